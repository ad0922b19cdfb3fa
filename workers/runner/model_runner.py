"""The engine's `Runner`: batch, forward pass, sampling. No scheduling and no sampling policy."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from kv_transfer.layout import Dtype, KVLayout
from workers.engine.plan import RunResult, StepPlan
from workers.model.arch import DecoderSpec
from workers.model.fallback import load_fallback
from workers.model.loader import fingerprint_weights
from workers.model.progress import Progress, ignore_progress
from workers.ops.base import DrawRows
from workers.runner.batch import Batch, make_batch
from workers.runner.kv_cache import TORCH_DTYPES, PagedKVCache
from workers.runner.probe import Model, prove_model
from workers.sampling.explain import explain_draw
from workers.sampling.sampler import sample


class ModelRunner:
    """One model over one paged cache. Owned by the engine thread."""

    def __init__(self, model: Model, cache: PagedKVCache, draw_rows: DrawRows | None = None) -> None:
        self.model, self._draw_rows = model, draw_rows
        self.cache = cache

    def execute(self, plan: StepPlan, on_layer: Callable[[int], None]) -> RunResult:
        """See `engine/plan.py`."""
        started = time.perf_counter_ns()
        layer_us: list[int] = []

        def layer_done(layer: int) -> None:
            layer_us.append((time.perf_counter_ns() - started) // 1000)
            on_layer(layer)

        batch = make_batch(plan, self.cache, layer_done)
        logits_RV = self.model.forward(batch.ids_T, batch.positions_T, batch.rows_R, batch.facts)
        tokens: list[int | None] = [None] * len(plan.chunks)
        explains: list[dict[str, Any] | None] = [None] * len(plan.chunks)
        if batch.draws:
            self._sample_into(plan, batch, logits_RV, tokens, explains)
        return RunResult(tokens, explains, tuple(layer_us), (time.perf_counter_ns() - started) // 1000)

    def _sample_into(
        self,
        plan: StepPlan,
        batch: Batch,
        logits_RV: Tensor,
        tokens: list[int | None],
        explains: list[dict[str, Any] | None],
    ) -> None:
        sampled = sample(logits_RV, batch.draws, self._draw_rows)
        for row, (chunk, token) in enumerate(zip(batch.sampled_chunks, sampled, strict=True)):
            tokens[chunk] = token
            if plan.chunks[chunk].explain:
                explains[chunk] = explain_draw(logits_RV[row], batch.draws[row], token)


def load_runner(
    folder: Path,
    dtype: Dtype,
    layout_dtype: Dtype,
    block_tokens: int,
    num_blocks: int,
    progress: Progress = ignore_progress,
) -> ModelRunner:
    """The model of `folder` computing in `dtype` over a fresh cache of `num_blocks` blocks in `layout_dtype`.

    Raises `ModelRefused` and `ModelDamaged` as `load_fallback`. Takes 2-4 s for 135M parameters, most of it imports.
    """
    model = load_fallback(folder, TORCH_DTYPES[dtype], progress)
    progress("warming up", 0.0)
    prove_model(model)
    spec = model.spec
    layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, block_tokens, layout_dtype)
    return ModelRunner(model, PagedKVCache(layout, num_blocks))


def digest_facts(folder: Path, spec: DecoderSpec, dtype: str) -> dict[str, str]:
    """What must be equal for two workers to share KV caches; for `kv_transfer.layout.make_model_digest`."""
    return {
        "weights": fingerprint_weights(folder),
        "spec": repr(spec),
        "quantization": dtype,
        "adapter": "none",
        "drafter": "none",
    }
