"""Is a request, a pool or a load bound by prefill or by decode? One pure function over measured times and targets.

Never a guess: where neither target is missed it says so, and names the larger share of the time as such.
"""

from dataclasses import dataclass
from typing import Literal

Bound = Literal["prefill", "decode", "both", "neither"]

LEVERS = {
    "prefill": "more prefill workers, a prefix cache, shorter prompts, or a larger chunk",
    "decode": "more decode workers or tensor parallelism, a smaller batch, quantized weights or KV, or speculation",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """What one request saw; milliseconds."""

    ttft_ms: float
    itl_ms: float | None
    """Median time between two tokens; None for a single token."""
    decode_ms: float
    """First token to last."""


@dataclass(frozen=True, slots=True)
class Targets:
    ttft_ms: float
    itl_ms: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    bound: Bound
    line: str


def diagnose(measured: Measured, targets: Targets) -> Diagnosis:
    """Which stage missed its target, in one line with the lever."""
    is_late = measured.ttft_ms > targets.ttft_ms
    is_slow = measured.itl_ms is not None and measured.itl_ms > targets.itl_ms
    ttft = f"TTFT {measured.ttft_ms:,.0f} ms against a target of {targets.ttft_ms:,.0f} ms"
    itl = f"ITL {measured.itl_ms or 0:,.1f} ms against a target of {targets.itl_ms:,.0f} ms"
    if is_late and is_slow:
        return Diagnosis("both", f"prefill-bound and decode-bound: {ttft}, {itl}. For prefill: {LEVERS['prefill']}. "
                                 f"For decode: {LEVERS['decode']}.")  # fmt: skip
    if is_late:
        return Diagnosis("prefill", f"prefill-bound: {ttft}. Helps: {LEVERS['prefill']}.")
    if is_slow:
        return Diagnosis("decode", f"decode-bound: {itl}. Helps: {LEVERS['decode']}.")
    return Diagnosis("neither", f"neither target is missed ({ttft}; {itl}); {_share(measured)}.")


def _share(measured: Measured) -> str:
    total = measured.ttft_ms + measured.decode_ms
    share = measured.ttft_ms / total if total > 0 else 0.0
    stage, part = ("the time to the first token", share) if share > 0.5 else ("generating tokens", 1 - share)
    return f"{part:.0%} of the time was {stage}"
