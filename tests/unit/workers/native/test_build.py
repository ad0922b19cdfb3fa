"""Without a compiler, with a broken one and with changed sources there is no library, and the reason is told."""

import ctypes
import shutil
from pathlib import Path

import pytest

from workers.errors import BackendUnavailable
from workers.native import build
from workers.ops import native
from workers.ops.select import select_ops


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The sources, without what a build made of them."""
    for path in build.FOLDER.iterdir():
        if path.suffix in (".cpp", ".h", ".inl"):
            shutil.copy(path, tmp_path)
    return tmp_path


@pytest.fixture
def only_compiler(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """Leaves a PATH that holds at most one compiler, a script with this body."""

    def leave(body: str | None) -> None:
        bin_folder = tmp_path_factory.mktemp("bin")
        monkeypatch.setenv("PATH", str(bin_folder))
        if body is not None:
            compiler = bin_folder / "g++"
            compiler.write_text(f"#!/bin/sh\n{body}\n")
            compiler.chmod(0o755)

    return leave


def test_no_compiler(folder: Path, only_compiler) -> None:
    only_compiler(None)
    outcome = build.build(folder)
    assert not outcome.is_built
    assert "no C++ compiler" in outcome.reason
    assert build.read_outcome(folder) == outcome
    with pytest.raises(BackendUnavailable, match=r"no C\+\+ compiler"):
        native.load_library(folder)


def test_a_compiler_that_fails_is_quoted_and_an_old_library_goes(folder: Path, only_compiler) -> None:
    (folder / build.LIBRARY.name).write_bytes(b"of other sources")
    only_compiler("echo 'x.cpp:1:1: error: no stars tonight' >&2; exit 1")
    outcome = build.build(folder)
    assert not outcome.is_built
    assert "no stars tonight" in outcome.reason
    assert not (folder / build.LIBRARY.name).exists()
    assert list(folder.glob(".build-*")) == []


def test_not_built_at_all(folder: Path) -> None:
    with pytest.raises(BackendUnavailable, match="make native"):
        native.load_library(folder)


def test_a_file_that_is_no_library(folder: Path) -> None:
    (folder / build.LIBRARY.name).write_bytes(b"no library")
    with pytest.raises(BackendUnavailable, match="does not load"):
        native.load_library(folder)


def test_a_library_of_other_sources_is_refused(folder: Path) -> None:
    if not build.LIBRARY.exists():
        pytest.skip("no library here")
    shutil.copy(build.LIBRARY, folder)
    assert isinstance(native.load_library(folder), ctypes.CDLL)
    with (folder / "pool.cpp").open("a") as source:
        source.write("// edited\n")
    with pytest.raises(BackendUnavailable, match="other sources"):
        native.load_library(folder)


def test_the_hash_knows_every_source(folder: Path) -> None:
    before = build.hash_sources(folder)
    sources = [path for path in folder.iterdir() if path.suffix in (".cpp", ".h", ".inl")]
    assert len(sources) >= 10
    for path in sources:
        content = path.read_bytes()
        path.write_bytes(content + b"\n")
        assert build.hash_sources(folder) != before
        path.write_bytes(content)
    assert build.hash_sources(folder) == before


def test_auto_falls_back_to_the_reference_and_says_why(folder: Path, only_compiler, monkeypatch) -> None:
    only_compiler(None)
    build.build(folder)
    load_library = native.load_library
    monkeypatch.setattr(native, "load_library", lambda: load_library(folder))
    choice = select_ops("auto", 1)
    assert choice.ops.name == "reference"
    assert "no C++ compiler" in choice.reason
    with pytest.raises(BackendUnavailable):
        select_ops("native", 1)


def test_a_level_or_number_of_threads_that_cannot_be_is_refused() -> None:
    if not build.LIBRARY.exists():
        pytest.skip("no library here")
    with pytest.raises(BackendUnavailable, match="0 threads"):
        native.NativeOps(0)
