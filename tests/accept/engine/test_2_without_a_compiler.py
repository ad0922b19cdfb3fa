"""Line 2, without a compiler: pip builds and installs Baton all the same, says why there are no native kernels, and the
plain-torch backend serves exact answers from that installation.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.bare_install import ROOT, BareInstall
from tests.support.oracle import MIN_MARGIN, expect, load_tokenizer
from tests.support.serve_process import ServeProcess, free_port

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(600)]

REASON = "no C++ compiler found"
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> BareInstall:
    return BareInstall(tmp_path_factory.mktemp("bare"))


def test_the_wheel_carries_the_reason_instead_of_kernels(bare: BareInstall) -> None:
    assert bare.wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in bare.names() if name.endswith(".so")]
    report = bare.read_report()
    assert report["is_built"] is False
    assert REASON in report["reason"]


def test_the_installation_is_what_runs(bare: BareInstall) -> None:
    places = bare.run(bare.python, "-c", "import cluster, workers; print(cluster.__file__, workers.__file__)").split()
    assert all(bare.python.parents[1] in Path(place).parents for place in places)


def test_baton_config_says_why(bare: BareInstall) -> None:
    lines = bare.run(bare.python.parent / "baton", "config", "laptop").splitlines()
    (backend,) = [line for line in lines if line.startswith("worker.backend")]
    assert "reference" in backend
    assert REASON in backend


def test_greedy_tokens_equal_transformers(bare: BareInstall) -> None:
    """Line 1 of two families, on the installation: what needs the kernels is skipped with the reason."""
    shutil.copytree(ROOT / "tests", bare.place / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, bare.place)
    output = bare.run(
        bare.python, "-m", "pytest", "-q", "-p", "no:cacheprovider",
        "tests/accept/engine/test_1_tokens_equal_transformers.py",
        "-k", "test_greedy_tokens and (llama-reference or gpt-oss-reference or llama-native) and sixteen-staggered",
    )  # fmt: skip
    assert "4 passed, 2 skipped" in output, output
    assert f"native kernels: {REASON}" in output


@pytest.fixture
def server(bare: BareInstall) -> Iterator[ServeProcess]:
    served = ServeProcess(
        free_port(), config="laptop", environ=bare.environ, is_real=True, python=bare.python, place=bare.place
    )
    try:
        yield served.wait_ready()
    finally:
        served.end()


@pytest.mark.ray
def test_one_request_to_baton_serve(server: ServeProcess, smollm2: Path) -> None:
    """The start-up line says why, and the answer is the oracle's: without kernels the default is exact fp32."""
    tokenizer = load_tokenizer(smollm2)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    expected = expect(smollm2, tuple(prompt), NUM_TOKENS)
    assert expected.min_margin >= MIN_MARGIN
    request = {"model": "smollm2-135m", "messages": QUESTION, "temperature": 0, "max_tokens": NUM_TOKENS}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=request, timeout=120, trust_env=False).json()
    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(expected.tokens, skip_special_tokens=True)
    (line,) = [line for line in server.output.splitlines() if REASON in line]
    assert "reference in fp32" in line
