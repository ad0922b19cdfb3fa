"""One signal asks for the end, later ones change nothing, and an end that hangs is cut short."""

import signal
import subprocess
import sys

import pytest

from cluster.ending import Ending, EndRequested

PROGRAM = """
import os, signal, sys, time
from cluster import ending
ending.ORDERLY_END_S = 0.3
end = ending.Ending(lambda: print("hard end", flush=True))
end.watch()
try:
    print("up", flush=True)
    time.sleep(30)
except ending.EndRequested as asked:
    print("asked:", asked, flush=True)
    if sys.argv[1] == "twice":
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    if sys.argv[1] == "hang":
        time.sleep(30)
    print("clean", flush=True)
"""


@pytest.mark.parametrize(
    ("number", "how", "told", "status"),
    [
        (signal.SIGINT, "once", "asked: Ctrl-C\nclean\n", 0),
        (signal.SIGTERM, "once", "asked: SIGTERM\nclean\n", 0),
        (signal.SIGHUP, "once", "asked: the terminal was closed\nclean\n", 0),
        (signal.SIGINT, "twice", "asked: Ctrl-C\nclean\n", 0),
        (signal.SIGINT, "hang", "asked: Ctrl-C\nhard end\n", 1),
    ],
)
def test_each_signal(number, how, told, status):
    heard = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n{PROGRAM}"  # whoever tests may ignore it
    with subprocess.Popen([sys.executable, "-c", heard, how], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout.readline() == "up\n"
        program.send_signal(number)
        assert program.communicate(timeout=10)[0] == told
        assert program.returncode == status


def test_a_start_under_nohup_survives_its_terminal():
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, "-c", PROGRAM, "once"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout.readline() == "up\n"
        program.send_signal(signal.SIGHUP)
        program.send_signal(signal.SIGTERM)
        assert program.communicate(timeout=10)[0] == "asked: SIGTERM\nclean\n"


def test_a_request_whose_error_was_swallowed_is_told_again(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    ending = Ending(lambda: None)
    ending.check()
    ending.reason = "Ctrl-C"
    with pytest.raises(EndRequested, match="Ctrl-C"):
        ending.check()
