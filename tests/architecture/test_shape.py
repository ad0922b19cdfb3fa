"""The house rules as tests: sizes, names, imports, paths named in docs. docs/code-style.md gives the reasons."""

import ast
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kv_transfer", "workers", "router", "cluster")
NAMED_PATH = re.compile(r"`((?:{}|configs|tests|docs)/[\w./-]+)`".format("|".join(PACKAGES)))
BANNED = re.compile(r"(^|_)(utils?|helpers?|common|misc|manager)($|_)|mixin", re.I)
MAX_FILE, MAX_FUNCTION, MAX_CLASS, MAX_PARAMETERS, MAX_CODE, MAX_IGNORES = 600, 80, 300, 8, 18_000, 20


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def code_lines(path: Path) -> int:
    lines = [line.strip() for line in path.read_text().splitlines()]
    return sum(1 for line in lines if line and not line.startswith("#"))


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def test_functions_are_short() -> None:
    sizes = {where: (node.end_lineno or 0) - node.lineno + 1 for where, node in functions()}
    assert {w: n for w, n in sizes.items() if n > MAX_FUNCTION} == {}
    assert sorted(sizes.values())[int(0.9 * len(sizes))] <= 40


def test_files_classes_and_the_whole_stay_within_budget() -> None:
    files = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p, _ in sources()}
    classes = {
        f"{p.relative_to(ROOT)}:{n.name}": (n.end_lineno or 0) - n.lineno + 1
        for p, tree in sources() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)
    }  # fmt: skip
    assert {f: n for f, n in files.items() if n > MAX_FILE} == {}
    assert {c: n for c, n in classes.items() if n > MAX_CLASS} == {}
    assert sum(code_lines(path) for path, _ in sources()) <= MAX_CODE


def test_functions_take_few_parameters() -> None:
    def count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        a = node.args
        return len([x for x in (*a.posonlyargs, *a.args, *a.kwonlyargs) if x.arg not in ("self", "cls")])

    assert {w: count(n) for w, n in functions() if count(n) > MAX_PARAMETERS} == {}


def test_names_say_what_a_thing_is() -> None:
    names = {str(p.relative_to(ROOT)): p.stem for p, _ in sources()}
    for path, tree in sources():
        names.update(
            {f"{path.relative_to(ROOT)}:{n.name}": n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
        )
    snake = {where: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name) for where, name in names.items()}
    assert [where for where, name in snake.items() if BANNED.search(name)] == []


def test_environment_is_read_in_one_file() -> None:
    readers = {
        str(p.relative_to(ROOT)) for p, tree in sources() for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and ast.unparse(n) in ("os.environ", "os.getenv")
    }  # fmt: skip
    assert readers <= {"cluster/env.py"}


def test_no_pickle_on_our_sockets() -> None:
    pickling = re.compile(r"\b(pickle|cloudpickle|marshal|shelve)\b")
    imports = [(p, n) for p, tree in sources() for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert [str(p.relative_to(ROOT)) for p, n in imports if pickling.search(ast.unparse(n))] == []


def test_type_ignores_are_few_and_reasoned() -> None:
    lines = [(str(p.relative_to(ROOT)), line) for p, _ in sources() for line in p.read_text().splitlines()]
    ignores = [(where, line) for where, line in lines if "type: ignore" in line]
    assert len(ignores) <= MAX_IGNORES
    assert [where for where, line in ignores if not re.search(r"type: ignore\[[\w, -]+\]\s+#\s*\w", line)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_come_from_this_checkout(package: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).is_relative_to(ROOT)


def test_paths_named_in_docs_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = [(page, name) for page in pages for name in NAMED_PATH.findall(page.read_text())]
    assert named
    assert [f"{p.relative_to(ROOT)}: {name}" for p, name in named if not (ROOT / name).exists()] == []


def test_no_path_of_this_machine_in_tracked_files() -> None:
    """Neither where this checkout stands nor the home of whoever runs the tests, whatever they are called."""
    places = {f"{place}/" for place in (ROOT, Path.home()) if len(place.parts) > 1}
    patterns = [part for place in sorted(places) for part in ("-e", place)]
    found = subprocess.run(
        ["git", "grep", "-nIF", *patterns, "--", "."], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert places
    assert found.stdout == ""
