"""The check that runs on GPUs, as far as a machine without one can hold it: its order, its words, its steps' code."""

import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.gpu import check, steps
from tests.gpu.check import Row, Step, report, run_steps, why_not
from tests.support.recording import TraceCapture

CHILDREN = {
    "good": f"print('noise'); print('{check.MARK}3 of 3')",
    "wrong": "raise AssertionError('tokens differ')",
    "mute": "pass",
    "crash": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "hang": "import time; time.sleep(60)",
}


def command(step: Step) -> tuple[str, ...]:
    return (sys.executable, "-c", CHILDREN[step.run])


def test_no_step_hides_another() -> None:
    wanted = [Step(name, name, limit_s=1.0 if name == "hang" else 30.0) for name in (*CHILDREN, "good")]
    rows = list(run_steps(wanted, 1, command))
    assert [row.outcome for row in rows] == ["ok", "FAILED", "FAILED", "FAILED", "FAILED", "ok"]
    assert [row.detail for row in rows[:3]] == ["3 of 3", "AssertionError: tokens differ", "ended with 0 and no word"]
    assert rows[3].detail.startswith("ended by signal 11")
    assert rows[4].detail == "no end after 1 s"


def test_a_step_that_cannot_run_is_never_ok(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [Step("two", "good", num_gpus=2), Step("later", ""), Step("one", "good")]
    assert report(run_steps(wanted, 1, command)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "not run  two: needs 2 GPUs"
    assert lines[1] == "not run  later: there is no such step yet"
    assert lines[2].startswith("ok       one: 3 of 3 (")
    assert lines[3] == "1 ok, 0 FAILED, 2 not run"
    assert report([Row("x", "FAILED", "y")]) == 1
    assert [row.outcome for row in run_steps(wanted, 2, command, total_s=0)] == ["not run"] * 3
    assert why_not(wanted[2], 2, -1.0) == "the 230 s of the whole check are used up"


def test_without_a_gpu_it_says_so_and_runs_nothing(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(check, "run_step", lambda *args: pytest.fail("a step was run"))
    assert check.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("no GPU here (torch")
    assert len(lines) == 2 + len(check.STEPS)
    for line in lines[1:-1]:
        assert line.startswith("not run  ")
        assert line.endswith(("needs a GPU", "needs 2 GPUs"))
    assert lines[-1] == f"0 ok, 0 FAILED, {len(check.STEPS)} not run"


def test_every_step_has_its_function() -> None:
    assert all(callable(getattr(steps, step.run)) for step in check.STEPS if step.run)
    assert len({step.name for step in check.STEPS}) == len(check.STEPS)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(steps, "DEVICE", "cpu")
    monkeypatch.setattr(steps, "make_capture", TraceCapture)
    monkeypatch.setattr(steps, "MODELS", {name: steps.MODELS[name] for name in ("llama", "gpt-oss")})
    monkeypatch.setattr(steps, "LENGTHS", (1, 16, 40))
    monkeypatch.setattr(steps, "NEW_TOKENS", 6)


@pytest.mark.parametrize(
    "name", ["check_decoder_fp32", "check_decoder_bf16", "check_graphs_fp32", "check_graphs_bf16", "check_draws"]
)
def test_the_steps_run_on_a_cpu(on_cpu: None, name: str) -> None:
    detail = getattr(steps, name)()
    assert "llama" in detail
    assert "gpt-oss" in detail


def test_the_step_of_two_ranks_runs_on_a_cpu(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MODELS", {"llama": steps.MODELS["llama"]})
    assert steps.check_tensor_parallel() == "llama equal"


def test_the_times_are_told(on_cpu: None) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 211}  # fmt: skip
    detail = steps.measure_decoder(small)
    assert "prompt of 1,024" in detail
    assert "16 rows" in detail


def test_a_wrong_backend_fails_the_steps(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = steps.CudaOps.norm

    def lower(self, x_TM, weight_M, eps, delta_TM=None):
        return norm(self, x_TM, weight_M, eps, delta_TM) * 0.99

    monkeypatch.setattr(steps.CudaOps, "norm", lower)
    with pytest.raises(AssertionError, match="logits differ"):
        steps.check_decoder_fp32()


def test_the_check_is_a_make_target() -> None:
    root = Path(check.__file__).resolve().parents[2]
    text = textwrap.dedent((root / "Makefile").read_text())
    assert "tests.gpu.check" in text
    assert os.path.samefile(root, check.ROOT)
