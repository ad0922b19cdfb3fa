"""Every "auto" is decided once, with a reason; explicit values that cannot work are refused."""

import dataclasses

import pytest

from cluster.config import WorkerConfig, load_cluster
from cluster.gpus import NO_GPUS, Gpus
from cluster.plan import share_gpus
from cluster.resolve import Machine, resolve_worker
from cluster.yaml_source import ConfigError
from workers.model.arch import make_spec

SPEC = make_spec(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
    }
)
GIB = 1 << 30


def resolve(memory_bytes=16 * GIB, native_fault="no compiler", decoder_fault="", gpus=NO_GPUS, windows=(), **worker):
    config, _ = load_cluster("laptop")
    config = config.model_copy(update={"worker": WorkerConfig(**worker)})
    machine = Machine(memory_bytes=memory_bytes, num_cpus=2, native_fault=native_fault, gpus=gpus)
    return resolve_worker(config, SPEC, machine, decoder_fault, windows)


@pytest.mark.parametrize(
    ("native_fault", "decoder_fault", "expected"),
    [
        ("", "", ("native", "q4", "bf16", 32)),
        ("no compiler", "", ("reference", "fp32", "fp32", 16)),
        ("", "unknown family", ("transformers", "fp32", "fp32", 16)),
    ],
)
def test_what_computes_follows_the_kernels_and_the_family(native_fault, decoder_fault, expected):
    worker, settings = resolve(native_fault=native_fault, decoder_fault=decoder_fault)
    assert (worker.backend, worker.dtype, worker.kv_dtype, worker.block_tokens) == expected
    (why,) = [setting.reason for setting in settings if setting.key == "worker.backend"]
    assert (decoder_fault or native_fault) in why


def test_the_exact_mode_keeps_an_exact_cache():
    worker, _ = resolve(native_fault="", dtype="fp32")
    assert (worker.backend, worker.dtype, worker.kv_dtype) == ("native", "fp32", "fp32")


def test_no_auto_is_left_and_each_setting_has_a_reason():
    worker, settings = resolve()
    assert "auto" not in dataclasses.asdict(worker).values()
    assert {setting.key.removeprefix("worker.") for setting in settings} == set(dataclasses.asdict(worker))
    assert all(setting.reason for setting in settings)


def test_the_context_is_the_models():
    assert resolve()[0].max_context_tokens == 8192


@pytest.mark.parametrize(("memory_bytes", "num_blocks"), [(GIB, 512), (4 * GIB, 728), (256 * GIB, 2048)])
def test_blocks_follow_memory_between_one_and_four_contexts(memory_bytes, num_blocks):
    assert resolve(memory_bytes)[0].num_blocks == num_blocks


def test_layers_with_windows_take_less_of_a_context():
    """25 of 30 layers with a window of 512: five groups of 5 for the window and one that keeps all."""
    mixed = [None if layer % 6 == 5 else 512 for layer in range(30)]
    settings = {"memory_bytes": GIB, "windows": mixed, "max_context_tokens": 8192, "block_tokens": 16}
    worker, found = resolve(**settings)
    window_pages = (512 + 128 - 3) // 16 + 2
    per_context = 8192 // 16 + 5 * window_pages
    (why,) = [setting.reason for setting in found if setting.key == "worker.num_blocks"]
    block_bytes = 5 * 2 * 3 * 64 * 4 * 16
    assert worker.num_blocks == GIB // 8 // block_bytes
    assert why.startswith(f"auto: {worker.num_blocks / per_context:.1f} full contexts, 128 MiB")
    assert resolve(**settings, num_blocks=per_context)[0].num_blocks == per_context
    with pytest.raises(ConfigError, match=f"hold no full context of 8192 tokens, which takes {per_context}"):
        resolve(**settings, num_blocks=per_context - 1)
    whole, _ = resolve(**settings, decoder_fault="unknown family")
    assert whole.num_blocks == 512, "the transformers classes keep all"


def test_an_explicit_value_wins():
    worker, settings = resolve(chunk_tokens=7, num_blocks=600)
    assert (worker.chunk_tokens, worker.num_blocks) == (7, 600)
    assert {s.reason for s in settings if s.key in ("worker.chunk_tokens", "worker.num_blocks")} == {"as configured"}


def test_a_pool_that_holds_no_full_context_is_refused():
    with pytest.raises(ConfigError, match=r"worker.num_blocks: 100 blocks of 16 tokens hold no full context of 8192"):
        resolve(num_blocks=100)


def test_a_context_over_the_models_positions_is_refused():
    with pytest.raises(ConfigError, match="9000 is over the model's 8192"):
        resolve(max_context_tokens=9000)


H200 = Gpus(memory_bytes=(140 * GIB,), fault="")


def test_a_gpu_is_used_where_one_is():
    worker, settings = resolve(gpus=H200)
    assert (worker.device, worker.backend, worker.dtype, worker.kv_dtype) == ("cuda", "cuda", "bf16", "bf16")
    assert (worker.block_tokens, worker.chunk_tokens) == (16, 2048)
    why = {setting.key: setting.reason for setting in settings}
    assert why["worker.device"] == "auto: 1 NVIDIA GPU(s)"
    assert why["worker.backend"].endswith("attention: gather + SDPA")
    assert "at most 1/4 of 140 GiB" in why["worker.num_blocks"]
    assert worker.num_blocks == 64 * 512  # max_running full contexts are less than the share


@pytest.mark.parametrize(
    ("worker", "gpus", "decoder_fault", "why"),
    [
        ({}, Gpus(fault="no NVIDIA GPU: nvidia-smi is not installed"), "", "auto: no NVIDIA GPU: nvidia-smi is not"),
        ({"backend": "native"}, H200, "", "auto: the backend native runs on the CPU"),
        ({}, H200, "unknown family", "auto: only our own decoder runs on a GPU: unknown family"),
        ({"device": "cpu"}, H200, "", "as configured"),
    ],
)
def test_otherwise_the_cpu_and_why(worker, gpus, decoder_fault, why):
    resolved, settings = resolve(gpus=gpus, decoder_fault=decoder_fault, native_fault="", **worker)
    assert resolved.device == "cpu"
    assert resolved.backend in ("native", "transformers")
    assert next(setting.reason for setting in settings if setting.key == "worker.device").startswith(why)


@pytest.mark.parametrize(
    ("worker", "gpus", "decoder_fault", "message"),
    [
        ({"device": "cuda"}, Gpus(fault="no NVIDIA GPU"), "", "worker.device: cuda, but no NVIDIA GPU"),
        ({"backend": "cuda"}, Gpus(fault="no NVIDIA GPU"), "", "worker.backend: cuda, but no NVIDIA GPU"),
        ({"device": "cuda", "backend": "native"}, H200, "", "the backend native runs on the CPU"),
        ({"device": "cuda"}, H200, "unknown family", "only our own decoder"),
        ({"device": "cpu", "backend": "cuda"}, H200, "", "contradict each other"),
    ],
)
def test_a_gpu_that_is_asked_for_and_cannot_be_used(worker, gpus, decoder_fault, message):
    with pytest.raises(ConfigError, match=message):
        resolve(gpus=gpus, decoder_fault=decoder_fault, **worker)


def test_workers_share_the_gpus():
    config, _ = load_cluster("laptop")
    on_gpu, _ = resolve(gpus=H200)
    on_cpu, _ = resolve()
    assert [share_gpus(on_gpu, count, config) for count in (1, 2, 3)] == [0.5, 1.0, 1.0]
    assert share_gpus(on_cpu, 0, config) == 0
