"""What is measured: three figures of every engine, two more of ours. Prompts are token ids, the same for all."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.bench.engines import ROOT, Engine
from tests.bench.process import EngineProcess

Figure = Literal["single", "batch16", "prefill", "contexts1000", "contexts4000"]
WHAT: dict[Figure, str] = {
    "single": "one stream, prompt 64, 64 tokens: decode tokens/s",
    "batch16": "16 streams, prompt 64, 64 tokens: decode tokens/s of all",
    "prefill": "one prompt of 1,024, its first token: prompt tokens/s",
    "contexts1000": "16 streams after contexts of 1,000, 16 tokens: decode tokens/s of all",
    "contexts4000": "16 streams after contexts of 4,000, 8 tokens: decode tokens/s of all",
}
LIMIT_S = 120.0
"""For one measurement."""


@dataclass(frozen=True, slots=True)
class Prompts:
    short: tuple[tuple[int, ...], ...]
    """16 of 64 tokens."""
    long: tuple[int, ...]
    """1,024 tokens."""


def make_prompts(folder: Path) -> Prompts:
    """Cut from the licence text with the model's tokenizer."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode((ROOT / "LICENSE").read_text()).ids
    return Prompts(tuple(tuple(ids[n * 100 : n * 100 + 64]) for n in range(16)), tuple(ids[300:1324]))


def figures_of(engine: Engine, is_default: bool) -> tuple[Figure, ...]:
    known = [figure for figure in WHAT if figure in engine.figures]
    return (*known, *(("contexts1000", "contexts4000") if is_default else ()))


def measure(process: EngineProcess, figure: Figure, prompts: Prompts) -> float:
    """Tokens per second. A short run of the same kind warms caches first. Raises `EngineFailed`."""
    match figure:
        case "single":
            _generate(process, prompts.short[:1], 8)
            return _decode_rate(_generate(process, prompts.short[:1], 64))
        case "batch16":
            _generate(process, prompts.short, 2)
            return _decode_rate(_generate(process, prompts.short, 64))
        case "prefill":
            _generate(process, (prompts.long[:128],), 1)
            return len(prompts.long) / float(_generate(process, (prompts.long,), 1)["first_s"])
        case "contexts1000":
            return _decode_rate(process.ask("long", LIMIT_S, contexts=16, context_tokens=1000, new_tokens=17))
        case "contexts4000":
            return _decode_rate(process.ask("long", LIMIT_S, contexts=16, context_tokens=4000, new_tokens=9))


def _generate(process: EngineProcess, prompts: tuple[tuple[int, ...], ...], new_tokens: int) -> dict[str, float]:
    return process.ask("generate", LIMIT_S, prompts=prompts, new_tokens=new_tokens)


def _decode_rate(timing: dict[str, float]) -> float:
    return timing["decoded"] / timing["decode_s"]
