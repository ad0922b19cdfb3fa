"""Line 1 inside the engine: in fp32 greedy tokens equal transformers `generate`, token for token, for every family and
SmolLM2, by every path and on every backend that runs here; logits differ by at most what docs/models.md says.
"""

from pathlib import Path

import pytest
import torch

from tests.accept.engine.conftest import GetCase
from tests.support.decoder_runs import compute_logits, generate, load
from tests.support.engine_paths import FEW, PATHS
from tests.support.families import FOREIGN, NEW_TOKENS, OURS, REFUSED, Case
from tests.support.oracle import load_oracle
from tests.support.tiny_models import save_tiny
from workers.errors import BackendUnavailable, ModelRefused
from workers.model.fallback import load_fallback
from workers.ops.select import select_ops
from workers.replica.config import ReplicaConfig
from workers.replica.loading import load_model
from workers.runner.probe import Model, prove_model

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(3600)]

MAX_LOGIT_ERROR, SHARE_OF_LARGEST = 1e-4, 1e-5
"""The larger one holds: on SmolLM2, whose logits reach 38, transformers itself is 1.1e-4 away from float64."""
SUBJECTS = [
    *((name, backend) for name in (*OURS, "smollm2") for backend in ("reference", "native")),
    *((name, "transformers") for name in (*OURS, "smollm2", *FOREIGN) if name != "gpt-oss"),
]
"""The transformers classes lack the sinks of gpt-oss over a paged cache, and refuse them."""


def choose_paths(name: str, backend: str, is_full: bool) -> tuple[str, ...]:
    """A slice goes fewer of them where a step is slow."""
    is_slow = (name == "smollm2") + (backend == "transformers") + (backend == "reference" and name == "smollm2")
    return tuple(PATHS) if is_full or not is_slow else FEW if is_slow == 1 else ("sixteen-staggered",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "path" in metafunc.fixturenames:
        is_full = bool(metafunc.config.getoption("--full"))
        pairs = [
            pytest.param(subject, path, id=f"{'-'.join(subject)}-{path}")
            for subject in SUBJECTS for path in choose_paths(*subject, is_full)
        ]  # fmt: skip
        metafunc.parametrize(("subject", "path"), pairs, indirect=["subject"], scope="module")
    elif "subject" in metafunc.fixturenames:
        metafunc.parametrize("subject", SUBJECTS, ids="-".join, indirect=True, scope="module")


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, get_case: GetCase) -> tuple[Model, Case]:
    """A model as one backend computes it, and what it must answer."""
    name, backend = request.param
    case = get_case(name)
    if backend == "transformers":
        return load_fallback(case.folder, torch.float32), case
    try:
        ops = select_ops(backend, 1).ops
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return load(case.folder, "fp32", ops), case


def test_greedy_tokens(subject: tuple[Model, Case], path: str) -> None:
    PATHS[path](*subject)


def test_logits(subject: tuple[Model, Case]) -> None:
    """Whole and in chunks, over the longest prompt."""
    model, case = subject
    text = max(case.prompts, key=len)
    with torch.inference_mode():
        expected_TV = load_oracle(case.folder)(torch.tensor([text])).logits[0]
    most = max(MAX_LOGIT_ERROR, SHARE_OF_LARGEST * float(expected_TV.abs().max()))
    for chunk in (1 << 30, 7 if len(text) < 100 else 64):
        assert (compute_logits(model, text, chunk) - expected_TV).abs().max() <= most


def test_the_runner_accepts_it(subject: tuple[Model, Case]) -> None:
    prove_model(subject[0])


def test_an_inexact_model_is_noticed(get_case: GetCase) -> None:
    """The comparison can fail: rounded weights change some token."""
    case = get_case("llama")
    rounded = generate(load(case.folder, "bf16"), case.prompts, NEW_TOKENS, 64)
    assert rounded.tokens != case.answers


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, changes, reason = REFUSED[name]
    save_tiny(kind, tmp_path, **changes)
    with pytest.raises(ModelRefused, match=reason):
        load_model(ReplicaConfig(role="decode", model_path=str(tmp_path), model_id=name, secret_path=""))
