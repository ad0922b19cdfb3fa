"""How near each mode comes to transformers in fp32: teacher-forced on fixed texts, through decoder and cache."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kv_transfer.layout import Dtype
from tests.bench.rows import Row
from tests.bench.texts import read_set
from tests.support.native_runs import logits_whole
from tests.support.oracle import load_oracle
from workers.model.build import WeightMode, load_decoder
from workers.ops.select import select_ops

Mode = tuple[WeightMode, Dtype]
MODES: tuple[Mode, ...] = (
    ("q4", "bf16"),
    ("q4", "fp32"),
    ("int8", "bf16"),
    ("bf16", "bf16"),
    ("fp32", "bf16"),
    ("fp32", "fp32"),
)
DEFAULT_MODE: Mode = ("q4", "bf16")


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one mode, over all positions of all texts."""

    kl: float
    """Mean over positions of KL(fp32 || mode) of the next token, in nats."""
    top1: float
    """Share of positions whose likeliest token is fp32's."""
    perplexity: float
    fp32_perplexity: float

    @property
    def perplexity_change(self) -> float:
        return self.perplexity / self.fp32_perplexity - 1


def measure_quality(folder: Path, say: Callable[[str], None]) -> tuple[list[Row], dict[str, Any]]:
    rows, detail = [], {}
    for name in ("shipped", "debian"):
        texts, missing = read_set(name, folder)
        for text, reason in missing.items():
            say(f"quality: {text} is left out: {reason}")
        if texts:
            found = judge_modes(folder, MODES, texts, say)
            rows += [row for mode, quality in found.items() for row in _rows(name, mode, quality)]
        detail[name] = {"texts": list(texts), "missing": missing, "tokens": sum(map(len, texts.values()))}
    return rows, detail


def judge_modes(
    folder: Path, modes: Sequence[Mode], texts: Mapping[str, Sequence[int]], say: Callable[[str], None]
) -> dict[Mode, Quality]:
    """The oracle runs once; each weight mode is loaded once."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        model = load_oracle(folder)
        exact = {name: model(torch.tensor([list(text)])).logits[0] for name, text in texts.items()}
        found = {}
        for weights in dict.fromkeys(weights for weights, _ in modes):
            decoder = load_decoder(folder, weights, select_ops("auto", 1).ops)
            for mode in (mode for mode in modes if mode[0] == weights):
                logits = {name: logits_whole(decoder, mode[1], text) for name, text in texts.items()}
                found[mode] = judge([(texts[name], exact[name], logits[name]) for name in texts])
                say(f"quality: {name_mode(mode)}: {found[mode]}")
        return found


def judge(parts: Sequence[tuple[Sequence[int], Tensor, Tensor]]) -> Quality:
    """Of (tokens, logits of fp32, logits of the mode) per text; logits are `[tokens, vocab]`."""
    kls, agrees, losses, exact_losses = [], [], [], []
    for tokens, exact_TV, found_TV in parts:
        log_p_TV, log_q_TV = exact_TV.log_softmax(-1), found_TV.log_softmax(-1)
        kls.append((log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1))
        agrees.append((exact_TV.argmax(-1) == found_TV.argmax(-1)).float())
        next_T1 = torch.tensor(tokens[1:])[:, None]
        losses.append(-log_q_TV[:-1].gather(1, next_T1))
        exact_losses.append(-log_p_TV[:-1].gather(1, next_T1))
    kl, top1 = (float(torch.cat(parts).mean()) for parts in (kls, agrees))
    perplexity, exact = (float(torch.cat(parts).mean().exp()) for parts in (losses, exact_losses))
    return Quality(kl, top1, perplexity, exact)


def name_mode(mode: Mode) -> str:
    return f"{mode[0]}, KV {mode[1]}"


def _rows(texts: str, mode: Mode, quality: Quality) -> list[Row]:
    is_default = mode == DEFAULT_MODE
    figures = (
        ("KL to fp32", "nats", quality.kl, "<= 0.010", quality.kl <= 0.010),
        ("top-1 agreement", "share", quality.top1, ">= 0.95", quality.top1 >= 0.95),
        ("perplexity", "", quality.perplexity, "within 2 %", abs(quality.perplexity_change) <= 0.02),
    )
    return [
        Row(
            name=f"{figure}, {texts} texts: {name_mode(mode)}",
            unit=unit,
            value=value,
            min=value,
            max=value,
            against="fp32" if figure == "perplexity" else "",
            ratio=1 + quality.perplexity_change if figure == "perplexity" else None,
            target=target if is_default else "",
            holds=holds if is_default else None,
        )
        for figure, unit, value, target, holds in figures
    ]
