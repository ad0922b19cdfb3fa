"""Steps show elapsed time, mark failures, and survive a closed terminal."""

import io

import pytest

from cluster.cli.progress import Step, Steps, Terminal


class ClosedTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_a_step_ends_with_its_time_and_note():
    stream, now = io.StringIO(), iter([10.0, 12.5, 12.5])
    with Steps(Terminal(stream), clock=lambda: next(now)).step("model") as step:
        step.note("ready")
    assert stream.getvalue() == f"  . {'model':<28}    2.5 s  ready\n"


def test_a_failed_step_is_marked():
    stream = io.StringIO()
    with pytest.raises(ValueError), Steps(Terminal(stream)).step("model"):
        raise ValueError("gone")
    assert stream.getvalue().startswith("  ! model")


def test_a_closed_terminal_stops_nothing():
    terminal = Terminal(ClosedTerminal())
    with Steps(terminal).step("ending") as step:
        step.note("workers")
    terminal.line("still here")
    assert terminal.is_tty


def test_progress_is_told_as_a_share():
    step = Step("model", lambda: 0.0)
    step.progress("unpacking", 0.25)
    assert step.render().endswith("unpacking 25%")
