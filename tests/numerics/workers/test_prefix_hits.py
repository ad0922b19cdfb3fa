"""An answer does not depend on what was cached: miss, hit, preempted and resumed, evicted and computed again.

Tokens are equal over the fp32 reference; over native 4-bit weights the logits are equal to the last bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kv_transfer.layout import Dtype
from tests.support.decoder_runs import load
from tests.support.native_runs import load_native
from tests.support.oracle import expect, make_prompts
from tests.support.tiny_models import save_tiny
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.plan import RunResult, StepPlan
from workers.engine.request import Request
from workers.model.decoder import Decoder
from workers.protocol import SamplingParams, StreamKey
from workers.runner.kv_cache import PagedKVCache, plan_layout
from workers.runner.model_runner import ModelRunner

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(900)]

S, NEW_TOKENS = 32, 40
FAMILIES = {
    "llama": {"hidden_size": 192, "head_dim": 32},
    "qwen3": {"hidden_size": 192, "head_dim": 32},
    "mistral": {"sliding_window": 40},
    "gemma3_text": {"sliding_window": 40},
}
"""With and without windows."""


@dataclass
class Recorder:
    """Stands between runner and model and keeps the logits of every sampled token, by request and position."""

    decoder: Decoder
    logits: dict[tuple[StreamKey, int], Tensor] = field(default_factory=dict)
    plan: StepPlan | None = None

    def __post_init__(self) -> None:
        self.spec, self.dtype = self.decoder.spec, self.decoder.dtype

    def forward(self, *arguments: object) -> Tensor:
        logits_RV = self.decoder.forward(*arguments)  # type: ignore[arg-type]
        assert self.plan is not None
        sampled = [chunk for chunk in self.plan.chunks if chunk.sampling is not None]
        for chunk, row_V in zip(sampled, logits_RV, strict=True):
            self.logits[chunk.key, chunk.output_position] = row_V.clone()
        return logits_RV


class Bench:
    """An engine over a real decoder."""

    def __init__(self, decoder: Decoder, dtype: Dtype, num_blocks: int, prefix_cache: bool = True) -> None:
        layout = plan_layout(decoder.spec, decoder.state(dtype), S, dtype)
        windows = tuple(group.window for group in layout.layer_groups)
        self.recorder = Recorder(decoder)
        self._runner = ModelRunner(self.recorder, PagedKVCache(layout, num_blocks))
        self.config = EngineConfig(
            block_tokens=S, num_blocks=num_blocks, chunk_tokens=48, max_running=8, max_context_tokens=200,
            prefix_cache=prefix_cache, windows=windows,
        )  # fmt: skip
        self.engine = Engine(self.config, self)
        self.num_preempted = 0

    def execute(self, plan: StepPlan, on_layer: Callable[[int], None]) -> RunResult:
        self.recorder.plan = plan
        return self._runner.execute(plan, on_layer)

    def run(self, *prompts: Sequence[int], num_tokens: int = NEW_TOKENS) -> "list[Answer]":
        """All at once, the first one the oldest."""
        requests = []
        for age, prompt in enumerate(prompts):
            name = len(self.recorder.logits) * 10 + age
            request = Request(
                key=StreamKey(name.to_bytes(16, "big"), 0), known=list(prompt), num_prompt=len(prompt),
                sampling=SamplingParams(max_tokens=num_tokens), arrival=float(age),
            )  # fmt: skip
            assert self.engine.reserve(request, self.config.pages_for(len(prompt)))
            self.engine.start(request.key)
            requests.append(request)
        while self.engine.has_work:
            self.num_preempted += len(self.engine.step().preempted)
            self.engine.check_integrity()
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> "Answer":
        rows = [self.recorder.logits[request.key, position] for position in range(request.num_outputs)]
        return Answer(request.known[request.num_prompt :], torch.stack(rows), request.num_cached)


@dataclass
class Answer:
    tokens: list[int]
    logits_TV: Tensor
    num_cached: int

    def assert_like(self, other: "Answer", is_exact: bool) -> None:
        assert self.tokens == other.tokens
        if is_exact:
            assert torch.equal(self.logits_TV, other.logits_TV)
        # Other chunks are other shapes of the same sums in plain torch.
        assert (self.logits_TV - other.logits_TV).abs().max() <= 5e-5 * other.logits_TV.abs().max()


def check(decoder: Decoder, dtype: Dtype, prompt: Sequence[int], other: Sequence[int], *, is_exact: bool) -> Answer:
    """Every way to the same answer; returns it."""
    assert len(prompt) > 3 * S
    (miss,) = Bench(decoder, dtype, 40, prefix_cache=False).run(prompt)
    assert miss.num_cached == 0
    bench = Bench(decoder, dtype, 40)
    first, _ = bench.run(prompt, other)
    (hit,) = bench.run(prompt)
    assert (first.num_cached, hit.num_cached) == (0, (len(prompt) - 1) // S * S)
    for found in (first, hit):
        found.assert_like(miss, is_exact)
    check_next_turn(bench, decoder, dtype, [*prompt, *miss.tokens, *other[:9]], is_exact=is_exact)
    if bench.config.windows != (None,):
        return miss  # windows hold so little that nothing is preempted or evicted here
    check_preempted(decoder, dtype, prompt, other, miss, is_exact=is_exact)
    check_evicted(decoder, dtype, prompt, other, miss, is_exact=is_exact)
    return miss


def check_next_turn(bench: Bench, decoder: Decoder, dtype: Dtype, turn: Sequence[int], *, is_exact: bool) -> None:
    """Blocks of generated tokens serve as a prompt's."""
    (found,) = bench.run(turn, num_tokens=8)
    assert found.num_cached == (len(turn) - 10) // S * S
    (plain,) = Bench(decoder, dtype, 40, prefix_cache=False).run(turn, num_tokens=8)
    found.assert_like(plain, is_exact)


def check_preempted(
    decoder: Decoder, dtype: Dtype, prompt: Sequence[int], other: Sequence[int], miss: Answer, *, is_exact: bool
) -> None:
    """The pool holds both prompts and not both answers: the younger one makes room and comes back."""
    num_blocks = -(-len(prompt) // S) + -(-len(other) // S) + 1
    for prefix_cache in (True, False):
        bench = Bench(decoder, dtype, num_blocks, prefix_cache)
        _, resumed = bench.run(other, prompt)
        assert bench.num_preempted > 0
        resumed.assert_like(miss, is_exact)


def check_evicted(
    decoder: Decoder, dtype: Dtype, prompt: Sequence[int], other: Sequence[int], miss: Answer, *, is_exact: bool
) -> None:
    """Another prompt takes part of what was cached: the rest of it is used, what is gone is computed again."""
    num_blocks = -(-(len(prompt) + NEW_TOKENS) // S) + 1
    bench = Bench(decoder, dtype, num_blocks)
    bench.run(prompt)
    bench.run([*reversed(other)][: 3 * S + 1], num_tokens=1)
    (found,) = bench.run(prompt)
    assert 0 < found.num_cached < (len(prompt) - 1) // S * S
    found.assert_like(miss, is_exact)


def tiny_texts(vocab: int) -> tuple[list[int], list[int]]:
    generator = torch.Generator().manual_seed(5)
    texts = torch.randint(3, vocab, (2, 150), generator=generator).tolist()
    return texts[0][:133], texts[1][:101]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_tiny_models_in_plain_torch(tmp_path: Path, family: str) -> None:
    save_tiny(family, tmp_path, **FAMILIES[family])
    check(load(tmp_path), "fp32", *tiny_texts(211), is_exact=False)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tiny_models_over_native_kernels(tmp_path: Path, family: str) -> None:
    save_tiny(family, tmp_path, **FAMILIES[family])
    check(load_native(tmp_path, "q4", 1), "bf16", *tiny_texts(211), is_exact=True)


def test_smollm2_fp32_against_transformers(smollm2: Path) -> None:
    torch.set_num_threads(1)
    prompt, other = make_prompts(smollm2, (129, 101))
    answer = check(load_native(smollm2, "fp32", 1), "fp32", prompt, other, is_exact=True)
    assert tuple(answer.tokens) == expect(smollm2, prompt, NEW_TOKENS).tokens


def test_smollm2_q4(smollm2: Path) -> None:
    prompt, other = make_prompts(smollm2, (129, 101))
    check(load_native(smollm2, "q4", 2), "bf16", prompt, other, is_exact=True)
