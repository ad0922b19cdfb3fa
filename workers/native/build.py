"""Builds the CPU kernels, and the fence of shared memory, beside their sources: `make native`, and pip by the hook in
hatch_build.py. Standard library only: it runs before anything is installed.

    libbaton.so   the library; it carries the hash of the sources it was built from
    build.json    how that went: `Outcome`, the reason where there is no library
"""

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
FENCE_FOLDER = FOLDER.parents[1] / "kv_transfer" / "native"
LIBRARY = FOLDER / "libbaton.so"
REPORT = FOLDER / "build.json"
COMPILERS = ("g++", "c++", "clang++")
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi",
    "-Wno-unknown-warning-option",
    "-Wno-maybe-uninitialized",  # GCC's own AVX-512 header
    "-ffp-contract=off",  # a * b + c is rounded the same in every function and at every inlining
)  # fmt: skip
LEVEL_FLAGS = {
    "kernels_avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
    "kernels_avx512.cpp": (
        "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni",
        "-mprefer-vector-width=512",
    ),
}  # fmt: skip
COMPILE_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a build came to."""

    is_built: bool
    reason: str
    """Why there is no library; "" where there is one."""
    compiler: str
    seconds: float
    source_hash: str


def hash_sources(folder: Path = FOLDER) -> str:
    """Changes with every byte of the C++ sources and with how they are compiled."""
    digest = hashlib.sha256(repr((FLAGS, sorted(LEVEL_FLAGS.items()))).encode())
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".cpp", ".h", ".inl")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def build(folder: Path = FOLDER) -> Outcome:
    """Build the library in `folder` and write the report; never raises for a compiler that is absent or fails.

    A library that fits its sources stays. The library appears whole or not at all; one of other sources goes away.
    """
    wanted, report, library = hash_sources(folder), folder / REPORT.name, folder / LIBRARY.name
    known = read_outcome(folder)
    if known is not None and known.is_built and known.source_hash == wanted and library.exists():
        return known
    started = time.monotonic()
    compiler = find_compiler()
    if compiler is None:
        reason = f"no C++ compiler found (looked for {', '.join(COMPILERS)})"
    else:
        reason = _compile(folder, compiler, wanted)
    outcome = Outcome(not reason, reason, compiler or "", round(time.monotonic() - started, 1), wanted)
    if reason:
        library.unlink(missing_ok=True)
    report.write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    return outcome


def read_outcome(folder: Path = FOLDER) -> Outcome | None:
    """The report of the last build; None where there was none."""
    try:
        return Outcome(**json.loads((folder / REPORT.name).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def find_compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def _compile(folder: Path, compiler: str, source_hash: str) -> str:
    """The empty string, or why there is no library."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
        objects = []
        for source in sorted(folder.glob("*.cpp")):
            objects.append(f"{scratch}/{source.stem}.o")
            hash_flag = f'-DBATON_SOURCE_HASH="{source_hash}"'
            if reason := _run(
                [compiler, *FLAGS, *_level_flags(source), hash_flag, "-c", str(source), "-o", objects[-1]]
            ):
                return reason
        linked = f"{scratch}/{LIBRARY.name}"
        if reason := _run([compiler, "-shared", "-pthread", *objects, "-o", linked]):
            return reason
        Path(linked).replace(folder / LIBRARY.name)
    return ""


def _level_flags(source: Path) -> tuple[str, ...]:
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return LEVEL_FLAGS.get(source.name, ()) if is_x86 else ()


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} does not run: {type(error).__name__}"
    if done.returncode == 0:
        return ""
    first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
    return f"{command[0]} fails: {first}"


def main() -> int:
    outcomes = {"native kernels": build(), "fence of shared memory": build(FENCE_FOLDER)}
    for name, outcome in outcomes.items():
        text = f"built in {outcome.seconds} s by {outcome.compiler}" if outcome.is_built else outcome.reason
        sys.stdout.write(f"{name}: {text}\n")
    return 0 if all(outcome.is_built for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
