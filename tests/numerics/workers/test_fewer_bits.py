"""Our decoder in fewer bits, on tiny random models of every family that it knows."""

from pathlib import Path

import pytest

from tests.support.decoder_runs import compute_logits, load
from tests.support.families import OURS
from tests.support.tiny_models import save_tiny
from workers.runner.probe import prove_model

pytestmark = pytest.mark.numerics


@pytest.mark.parametrize("name", sorted(OURS))
def test_fewer_bits_err_more(name: str, tmp_path: Path) -> None:
    """Each grid is near the exact model, and none is the exact model. Small weights: a random model is chaotic."""
    family = OURS[name]
    save_tiny(family.kind, tmp_path, jitter=0.02, **(family.changes | {"initializer_range": 0.06}))
    text = range(3, 93)
    exact_TV = compute_logits(load(tmp_path), text)
    models = [load(tmp_path, mode) for mode in ("bf16", "int8", "q4")]
    for model in models:
        prove_model(model)
    found = [compute_logits(model, text) for model in models]
    errors = [float((each_TV - exact_TV).std() / exact_TV.std()) for each_TV in found]
    assert errors == sorted(errors)
    assert 0 < errors[0] < 0.1
    assert errors[1] < 0.2
    assert errors[2] < 0.5
