"""The CUDA backend's own decisions, on the CPU: kernels of other packages, how they are called and when not trusted."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import paged_packages
from tests.support.ops_cases import assert_close, make_layer, make_step, random_cache, random_tensor, random_weight
from workers.errors import BackendUnavailable
from workers.ops.base import DecodeTables
from workers.ops.cuda import ALL_EXPERTS_TOKENS, CudaOps
from workers.ops.cuda_attention import FlashAttention, find_fault, make_paged_batch
from workers.ops.cuda_flashinfer import FlashInferAttention
from workers.ops.reference import ReferenceOps
from workers.ops.select import select_ops
from workers.ops.weights import DenseMLP, DenseWeight, RoutedMLP

CPU = torch.device("cpu")
MIXED = ((0, 5), (37, 1), (12, 9), (255, 1), (256, 1), (0, 1), (31, 33))
BLOCK_TOKENS = {"flash-attn 3": 16, "flash-attn 2": 256, "FlashInfer 0.0": 16}


def install(monkeypatch: pytest.MonkeyPatch, **packages: Any) -> None:
    for name in ("flash_attn", "flash_attn_interface", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, packages.get(name))  # None: importing it fails


@pytest.fixture(params=sorted(BLOCK_TOKENS))
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    match request.param:
        case "flash-attn 3":
            install(monkeypatch, flash_attn_interface=paged_packages.flash_attn_3())
            return FlashAttention(16)
        case "flash-attn 2":
            install(monkeypatch, flash_attn=paged_packages.flash_attn_2())
            return FlashAttention(256)
    install(monkeypatch, flashinfer=paged_packages.flashinfer())
    return FlashInferAttention(CPU)


@pytest.mark.parametrize("traits", [{}, {"window": 20}, {"window": 1}, {"softcap": 5.0, "scale": 0.2}])
def test_a_kernel_is_called_as_its_package_documents(kernel, traits: dict[str, Any]) -> None:
    layer, block_tokens = make_layer(6, 2, 64, **traits), BLOCK_TOKENS[kernel.name]
    for chunks in (MIXED, [(7, 1), (300, 1)], [(0, 20)]):
        tables, num_blocks = make_step(chunks, block_tokens)
        cache = random_cache(tables, num_blocks, layer, block_tokens, torch.bfloat16)
        q_THD = random_tensor(len(tables.positions_T), 6, 64).bfloat16().float()
        ops = CudaOps("cpu", kernel, block_tokens)
        found_TN = ops.attend(q_THD, layer, tables, cache)
        assert_close(found_TN, ReferenceOps(torch.float64).attend(q_THD.double(), layer, tables, cache), 5e-3)
    assert find_fault(kernel, layer, block_tokens, CPU) is None


def test_what_a_kernel_lacks_is_gathered(kernel) -> None:
    block_tokens = BLOCK_TOKENS[kernel.name]
    cache = torch.zeros(1, 2, 2, block_tokens, 64)
    half = cache.bfloat16()
    assert kernel.refuses(make_layer(6, 2, 64), half) is None
    assert kernel.refuses(make_layer(6, 2, 64), cache) == "a cache of float32"
    assert kernel.refuses(make_layer(6, 2, 64, sinks_H=torch.zeros(6)), half) == "attention sinks"
    wide = torch.zeros(1, 2, 2, block_tokens, 264, dtype=torch.bfloat16)
    assert kernel.refuses(make_layer(6, 2, 264), wide) == "head_dim 264"


class Wrong:
    """A kernel whose windows are off by one, or that raises."""

    name = "wrong"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def refuses(self, attention, cache) -> None:
        return None

    def attend(self, q_THD, attention, batch, cache):
        if self.error:
            raise self.error
        return torch.zeros_like(q_THD)

    def begin_replay(self, tables, contexts, block_tokens) -> None:
        return


def test_a_kernel_that_errs_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    layer = make_layer(6, 2, 64)
    assert "differs by 1.0e+00 of the largest output" in (find_fault(Wrong(), layer, 16, CPU) or "")
    fault = find_fault(Wrong(RuntimeError("no kernel image\nis available")), layer, 16, CPU)
    assert fault == "RuntimeError: no kernel image"
    ops = CudaOps("cpu", Wrong())
    ops.make_step(SimpleNamespace(layers=[SimpleNamespace(attention=layer, mlp=make_mlp(ops))]))  # type: ignore[arg-type]
    assert "wrong" in caplog.text
    tables, num_blocks = make_step(MIXED, 16)
    cache = random_cache(tables, num_blocks, layer, 16, torch.bfloat16)
    q_THD = random_tensor(len(tables.positions_T), 6, 64)
    expected_TN = ReferenceOps(torch.float64).attend(q_THD.double(), layer, tables, cache)
    assert_close(ops.attend(q_THD, layer, tables, cache), expected_TN, 1e-5)


def make_mlp(ops: CudaOps, width: int = 64) -> DenseMLP:
    return DenseMLP(
        gate_up=ops.pack(random_weight("bf16", 192, width)), down=ops.pack(random_weight("bf16", width, 96)),
        activation="silu",
    )  # fmt: skip


def decode_tables(contexts: list[int], block_tokens: int, width: int) -> tuple[DecodeTables, int]:
    """Every row one token; entries beyond a context repeat a block that is not its own."""
    tables, num_blocks = make_step([(context - 1, 1) for context in contexts], block_tokens)
    table_NW = torch.zeros((len(contexts), width), dtype=torch.int32)
    for row, span in enumerate(tables.spans):
        own = tables.table_X[span.first_entry : span.first_entry + span.num_blocks]
        table_NW[row, : span.num_blocks] = own
    return DecodeTables(
        tables.positions_T,
        tables.block_of_T,
        tables.slot_of_T,
        tables.table_X,
        (),
        table_NW,
        torch.tensor(contexts, dtype=torch.int32),
    ), num_blocks


@pytest.mark.parametrize("traits", [{}, {"window": 20}, {"softcap": 5.0}, {"sinks_H": torch.ones(6)}])
def test_decode_tables_give_what_spans_give(traits: dict[str, Any]) -> None:
    layer = make_layer(6, 2, 64, **traits)
    contexts = [1, 16, 17, 100]
    tables, num_blocks = decode_tables(contexts, 16, 9)
    spans, _ = make_step([(context - 1, 1) for context in contexts], 16)
    cache = random_cache(spans, num_blocks, layer, 16, torch.float32)
    q_THD = random_tensor(4, 6, 64)
    expected_TN = ReferenceOps(torch.float64).attend(q_THD.double(), layer, spans, cache)
    assert_close(CudaOps("cpu").attend(q_THD, layer, tables, cache), expected_TN, 1e-5)


def test_a_recorded_step_of_flashinfer_is_planned_before_each_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, flashinfer=paged_packages.flashinfer())
    kernel = FlashInferAttention(CPU)
    ops, layer = CudaOps("cpu", kernel), make_layer(6, 2, 64, window=30)
    tables, num_blocks = decode_tables([1, 16, 17, 100], 16, 9)
    for contexts in ([1, 16, 17, 100], [60, 2, 33, 144]):
        fresh, num_blocks = decode_tables(contexts, 16, 9)
        tables.table_NW.copy_(fresh.table_NW)
        tables.context_N.copy_(fresh.context_N)
        spans, _ = make_step([(context - 1, 1) for context in contexts], 16)
        cache = random_cache(spans, num_blocks, layer, 16, torch.bfloat16)
        q_THD = random_tensor(4, 6, 64).bfloat16().float()
        ops.begin_replay(tables, contexts, 16)
        expected_TN = ReferenceOps(torch.float64).attend(q_THD.double(), layer, spans, cache)
        assert_close(ops.attend(q_THD, layer, tables, cache), expected_TN, 5e-3)
    (planned,) = kernel._recorded.values()
    assert planned.wrapper.num_plans == 2


def test_a_batch_is_made_once_per_step() -> None:
    tables, _ = make_step(MIXED, 16)
    ops = CudaOps("cpu")
    assert ops._batch_of(tables, 16) is ops._batch_of(tables, 16)
    assert make_paged_batch(tables, 16).edges_N.tolist() == [0, 5, 6, 15, 16, 17, 18, 51]


def test_stacked_experts_hold_their_memory_once() -> None:
    ops = CudaOps("cpu")
    experts = tuple(make_mlp(ops) for _ in range(4))
    router = ops.pack(DenseWeight(random_tensor(4, 64)))
    mlp = RoutedMLP(router=router, router_bias_E=None, top_k=2, renormalize=True, experts=experts)
    for tokens in (1, ALL_EXPERTS_TOKENS, ALL_EXPERTS_TOKENS + 1):
        assert ops.experts(random_tensor(tokens, 64), mlp).shape == (tokens, 64)
    stack = ops._stacks[id(mlp)]
    assert [expert.gate_up.data_NK.data_ptr() for expert in experts] == [  # type: ignore[attr-defined]
        stack.gate_up_ENK[number].data_ptr() for number in range(4)
    ]


@pytest.mark.parametrize("name", ["flashinfer", "flash_attn_interface", "flash_attn", "none"])
def test_the_choice_says_why(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    packages = {
        "flashinfer": paged_packages.flashinfer(), "flash_attn_interface": paged_packages.flash_attn_3(),
        "flash_attn": paged_packages.flash_attn_2(), "none": None,
    }  # fmt: skip
    install(monkeypatch, **{name: packages[name]})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "device", lambda *args: CPU)
    assert (
        select_ops("cuda", 1, block_tokens=16).reason
        == {
            "flashinfer": "cuda: FlashInfer 0.0; flash-attn is not installed; layers it lacks: gather + SDPA",
            "flash_attn_interface": "cuda: flash-attn 3; layers it lacks: gather + SDPA",
            "flash_attn": "cuda: gather + SDPA (flash-attn 2 reads blocks of 256 tokens, not of 16, "
            "flashinfer is not installed)",
            "none": "cuda: gather + SDPA (flash-attn is not installed, flashinfer is not installed)",
        }[name]
    )


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(BackendUnavailable, match=r"cuda: (no CUDA device is visible|torch .* was built without CUDA)"):
        select_ops("cuda", 1)
