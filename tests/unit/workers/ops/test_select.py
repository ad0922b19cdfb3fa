from pathlib import Path

import pytest

from workers.errors import BackendUnavailable
from workers.ops import native, select
from workers.ops.reference import ReferenceOps


def test_reference_when_asked() -> None:
    choice = select.select_ops("reference", 1)
    assert isinstance(choice.ops, ReferenceOps)
    assert choice.reason == "reference: plain torch, asked for"


def test_without_kernels_reference_serves_and_the_reason_is_told(monkeypatch, tmp_path: Path) -> None:
    load = native.load_library
    monkeypatch.setattr(native, "load_library", lambda: load(tmp_path))
    choice = select.select_ops("auto", 1)
    assert choice.ops.name == "reference"
    assert choice.reason.startswith("reference: plain torch; native kernels: ")
    with pytest.raises(BackendUnavailable, match="native kernels"):
        select.select_ops("native", 1)


def test_auto_takes_the_native_kernels_where_they_run() -> None:
    try:
        native.load_library()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    choice = select.select_ops("auto", 1)
    assert choice.ops.name == "native"
    assert choice.reason.endswith("kernels, 1 threads")
