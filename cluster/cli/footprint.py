"""What `baton validate` tells of memory: weights, KV cache, what fits, and what other precisions would change."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cluster.config import ModelConfig, QualityFigures
from cluster.plan import ClusterPlan
from kv_transfer.layout import Dtype
from workers.errors import ModelRefused
from workers.model.arch import DecoderSpec, read_config, read_spec
from workers.model.families import plan_decoder
from workers.model.footprint import MODE_BITS, count_weights, model_bytes, plan_paging, request_bytes
from workers.model.state import kv_state

KIB, MIB = 1 << 10, 1 << 20
SHORT_CONTEXT = 1000
PAIRS: tuple[tuple[str, Dtype], ...] = (
    ("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16"), ("int8", "bf16"), ("q4", "bf16"), ("q4", "fp32"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Facts:
    """Of a model on disk."""

    spec: DecoderSpec
    windows: tuple[int | None, ...]
    num_weights: int
    is_tied: bool

    def weight_bytes(self, mode: str) -> int:
        vocabulary = self.spec.vocab_size * self.spec.hidden_size
        return model_bytes(self.num_weights, vocabulary, mode, is_tied=self.is_tied)

    def request_bytes(self, kv: Dtype, num_tokens: int) -> int:
        return request_bytes(kv_state(self.spec.num_kv_heads, self.spec.head_dim, self.windows, kv), num_tokens)


def read_facts(plan: ClusterPlan) -> Facts:
    """From config.json and the headers of the weights. Raises as `read_spec`."""
    config, spec = read_config(plan.model_path), read_spec(plan.model_path)
    try:
        windows = tuple(layer.window for layer in plan_decoder(config).layers)
    except ModelRefused:
        windows = (None,) * spec.num_layers
    is_tied = bool(config.get("tie_word_embeddings"))
    return Facts(spec, windows, count_weights(plan.model_path), is_tied)


def describe_footprint(plan: ClusterPlan, facts: Facts) -> list[str]:
    """Lines for people. Pure."""
    worker, spec = plan.worker, facts.spec
    kv: Dtype = "fp32" if worker.kv_dtype == "fp32" else "bf16"
    windows = (None,) * spec.num_layers if worker.backend == "transformers" else facts.windows
    state = kv_state(spec.num_kv_heads, spec.head_dim, windows, kv)
    shape = (worker.block_tokens, worker.max_context_tokens, worker.chunk_tokens)
    pool_bytes = worker.num_blocks * plan_paging(state, *shape).block_bytes
    memory = facts.weight_bytes(worker.dtype) + pool_bytes
    return [
        f"weights   {facts.num_weights:,} numbers: "
        + ", ".join(f"{facts.weight_bytes(mode) / MIB:,.0f} MiB in {mode}" for mode in MODE_BITS),
        *_describe_kinds(facts, kv),
        f"pool      {worker.num_blocks:,} blocks of {worker.block_tokens} tokens, {pool_bytes / MIB:,.0f} MiB a worker",
        "",
        f"In the {memory / MIB:,.0f} MiB that weights and pool of a worker take:",
        *_table(plan.model, facts, memory, worker.max_context_tokens),
    ]


def _describe_kinds(facts: Facts, kv: Dtype) -> Iterator[str]:
    """A line per kind of layer."""
    per_layer = facts.spec.kv_bytes_per_token_and_layer(4 if kv == "fp32" else 2)
    for window in dict.fromkeys(facts.windows):
        count = facts.windows.count(window)
        kind = "full attention" if window is None else f"a window of {window:,} tokens"
        keeps = f"{count * per_layer / KIB:,.1f} KiB a token" + ("" if window is None else f" up to {window:,}")
        yield f"KV cache  {count} layers with {kind}: {per_layer:,} bytes a token and layer in {kv}, {keeps}"


def _table(model: ModelConfig, facts: Facts, memory: int, context: int) -> Iterator[str]:
    header = ("weights", "KV", "KV a token", f"requests of {SHORT_CONTEXT:,}", f"of {context:,}", "against fp32")
    yield "  {:8}  {:5}  {:>11}  {:>17}  {:>9}  {}".format(*header)
    for mode, kv in PAIRS:
        room = max(0, memory - facts.weight_bytes(mode))
        short, full = (room // facts.request_bytes(kv, tokens) for tokens in (SHORT_CONTEXT, context))
        per_token = f"{facts.spec.kv_bytes_per_token(4 if kv == 'fp32' else 2) / KIB:,.1f} KiB"
        yield (
            f"  {mode:8}  {kv:5}  {per_token:>11}  {short:>17,}  {full:>9,}  "
            f"{_describe_quality(model.quality, f'{mode}/{kv}')}"
        )


def _describe_quality(known: Mapping[str, QualityFigures], key: str) -> str:
    if key == "fp32/fp32":
        return "exact"
    found = known.get(key)
    return "not measured" if found is None else f"KL {found.kl:.4f}, perplexity {found.perplexity_percent:+.1f} %"
