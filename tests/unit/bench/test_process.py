"""The process of an engine: answers, reasons, and nothing left behind."""

import sys
from pathlib import Path

import psutil
import pytest

from tests.bench.engines import RUNNERS
from tests.bench.process import EngineFailed, EngineProcess
from tests.support.serve_process import wait_for

ENGINE = """
import os, sys, time
from lines import Watch, serve

class Toy:
    def load(self, threads):
        print("a library that prints")
        return {"version": "1", "threads": threads}

    def generate(self, prompts, new_tokens):
        watch = Watch(len(prompts))
        for step in range(new_tokens):
            for stream in range(len(prompts)):
                watch.saw(stream, [step])
        return watch.done()

    def do_fail(self):
        raise RuntimeError("no such thing")

    def do_end(self):
        sys.stderr.write("the last word\\n")
        sys.stderr.flush()
        os._exit(3)

    def do_hang(self):
        time.sleep(60)

serve(Toy())
"""


@pytest.fixture
def toy(tmp_path: Path):
    path = tmp_path / "toy.py"
    path.write_text(ENGINE)
    with EngineProcess([sys.executable, str(path)], {"PYTHONPATH": str(RUNNERS)}, tmp_path / "log") as process:
        yield process


def test_it_answers_and_says_how_long_loading_took(toy: EngineProcess) -> None:
    facts = toy.ask("load", 20, threads=2)
    assert (facts["version"], facts["threads"]) == ("1", 2)
    assert facts["load_s"] >= 0
    timing = toy.ask("generate", 20, prompts=[[1], [2]], new_tokens=3)
    assert (timing["decoded"], timing["head"]) == (4, [0, 1, 2])
    assert toy.peak_memory_bytes() > 1 << 20


def test_a_failure_is_a_reason_and_the_process_goes_on(toy: EngineProcess) -> None:
    with pytest.raises(EngineFailed, match="RuntimeError: no such thing"):
        toy.ask("fail", 20)
    assert toy.ask("load", 20, threads=1)["threads"] == 1


def test_the_end_of_the_process_is_a_reason_with_its_last_words(toy: EngineProcess) -> None:
    with pytest.raises(EngineFailed, match="ended during end: the last word"):
        toy.ask("end", 20)


def test_a_late_answer_is_a_reason(toy: EngineProcess) -> None:
    toy.ask("load", 20, threads=1)
    with pytest.raises(EngineFailed, match=r"hang: no answer within 0 s"):
        toy.ask("hang", 0.2)


def test_a_paused_process_takes_no_time_and_is_gone_when_closed(toy: EngineProcess) -> None:
    toy.ask("load", 20, threads=1)
    toy.pause()
    process = psutil.Process(toy._process.pid)
    wait_for("it stands still", lambda: process.status() == psutil.STATUS_STOPPED, 10)
    toy.close()
    assert not psutil.pid_exists(process.pid)
