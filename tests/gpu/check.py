"""`make gpu-check`: everything that only a GPU can prove, one line per step, in under four minutes.

Each step runs in a process of its own, so that none hides another: a crash, a hang or a poisoned CUDA context ends that
step alone. A step that cannot run here says `not run` and why, never `ok`. Without a GPU nothing runs and the check
ends with 0; with one it ends with 1 when a step failed.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TOTAL_S = 230.0
"""For all steps together."""
MODULE = "tests.gpu.check"
ROOT = Path(__file__).resolve().parents[2]
MARK = "gpu-check-detail: "
NCCL_VARIABLES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "CUDA_MODULE_LOADING": "EAGER"}
"""We abort ourselves; kernels loaded lazily can hang a communicator that waits for its peer."""


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    run: str
    """Name of a function of `tests/gpu/steps.py`: its answer is the detail of the line, an error fails the step. Empty:
    there is none yet."""
    num_gpus: int = 1
    limit_s: float = 60.0


STEPS = (
    Step("versions", "show_versions", limit_s=30),
    Step("op set against the reference in float64", "check_ops", limit_s=90),
    Step("kernels of other packages against gathered attention", "check_kernels", limit_s=90),
    Step("decoder in fp32: tokens and logits of the reference", "check_decoder_fp32"),
    Step("decoder in bf16 within its bounds of the reference", "check_decoder_bf16"),
    Step("CUDA graphs: tokens of the steps that they record, fp32", "check_graphs_fp32"),
    Step("CUDA graphs: the same, bf16 and the chosen kernel", "check_graphs_bf16"),
    Step("random draws: the tokens of the CPU", "check_draws"),
    Step("NCCL: one rank, grouped send to itself, abort", "check_nccl_alone", limit_s=45),
    Step("memory and time of a decoder, eager and recorded", "measure_decoder", limit_s=90),
    Step("CUDA IPC between two processes", ""),
    Step("prefill and decode through CUDA IPC, token for token", ""),
    Step("NCCL: a two-rank lane", "", num_gpus=2),
    Step("NCCL: SIGKILL of one side, aborted in under 1 s", "", num_gpus=2),
    Step("tensor parallel 2: tokens of one GPU", "check_tensor_parallel", num_gpus=2),
)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    outcome: str
    """`ok`, `FAILED` or `not run`."""
    detail: str
    took_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.outcome:8} {self.name}: {self.detail}" + (f" ({self.took_s:.1f} s)" if self.took_s else "")


def why_not(step: Step, num_gpus: int, left_s: float) -> str:
    """Why the step does not run; empty where it does."""
    if num_gpus < step.num_gpus:
        return f"needs {step.num_gpus} GPUs" if step.num_gpus > 1 else "needs a GPU"
    if not step.run:
        return "there is no such step yet"
    return "" if left_s > 0 else f"the {TOTAL_S:.0f} s of the whole check are used up"


def run_steps(
    steps: Sequence[Step], num_gpus: int, command: Callable[[Step], Sequence[str]], total_s: float = TOTAL_S
) -> Iterator[Row]:
    """The row of each step as it ends."""
    end = time.monotonic() + total_s
    for step in steps:
        lack = why_not(step, num_gpus, end - time.monotonic())
        if lack:
            yield Row(step.name, "not run", lack)
            continue
        yield run_step(step, command(step), min(step.limit_s, end - time.monotonic()))


def run_step(step: Step, command: Sequence[str], limit_s: float) -> Row:
    started = time.monotonic()
    environment = {**os.environ, **NCCL_VARIABLES, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit_s, cwd=ROOT, env=environment,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Row(step.name, "FAILED", f"no end after {limit_s:.0f} s", time.monotonic() - started)
    took_s = time.monotonic() - started
    told = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode == 0 and told:
        return Row(step.name, "ok", told[-1], took_s)
    if done.returncode < 0:
        return Row(step.name, "FAILED", f"ended by signal {-done.returncode}; {_last_line(done.stderr)}", took_s)
    return Row(step.name, "FAILED", _last_line(done.stderr) or f"ended with {done.returncode} and no word", took_s)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def count_gpus() -> tuple[int, str]:
    """(GPUs, why there is none)."""
    import torch

    if not torch.cuda.is_available():
        return 0, f"torch {torch.__version__}" + ("" if torch.version.cuda else ", built for the CPU alone")
    return torch.cuda.device_count(), ""


def report(rows: Iterable[Row]) -> int:
    """Prints each row as it comes and the sum; the exit status."""
    counts = dict.fromkeys(("ok", "FAILED", "not run"), 0)
    for row in rows:
        print(row, flush=True)
        counts[row.outcome] += 1
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if counts["FAILED"] else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--step", help="run one function of tests/gpu/steps.py in this process")
    options = parser.parse_args(arguments)
    if options.step:
        from tests.gpu import steps

        print(f"{MARK}{getattr(steps, options.step)()}")
        return 0
    num_gpus, lack = count_gpus()
    if not num_gpus:
        print(f"no GPU here ({lack}): nothing is run, nothing is proven")
    return report(run_steps(STEPS, num_gpus, lambda step: (sys.executable, "-m", MODULE, "--step", step.run)))


if __name__ == "__main__":
    sys.exit(main())
