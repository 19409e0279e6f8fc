"""The house rules that a program can check: arrows, circles, the seam, lengths, existing docs."""

import ast
import re
import statistics
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "billfish"
# Each room may import the rooms before it, and itself.
ROOMS = [
    "formats",
    "kernels",
    "solvers",
    "schemes",
    "checkpoints",
    "models",
    "engine",
    "offline",
    "server",
    "integrations",
    "evaluate",
    "bench",
    "cli",
]
# Whatever serves a token imports neither solvers nor the offline job; nor do these import each
# other.
NEVER = {
    "kernels": {"formats"},
    "checkpoints": {"solvers"},
    "models": {"solvers"},
    "engine": {"solvers"},
    "server": {"solvers", "offline", "formats", "kernels", "schemes", "checkpoints", "models"},
    "integrations": {"solvers", "offline", "engine", "server"},
    "evaluate": {"solvers", "offline", "server", "integrations"},
    "bench": {"solvers", "offline", "integrations"},
}
LEAVES = {"errors", "version"}  # may be imported by everyone
LAZY = {"cli", "__init__", "__main__"}  # import rooms where they are needed: --help must be quick
ROOT_MODULES = {"__init__", "__main__", *LEAVES}
FILES = sorted(PACKAGE.rglob("*.py"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in FILES}


def room_of(module):
    """The room; of a module at the root its own name."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@cache
def parsed(path):
    return ast.parse(path.read_text())


@cache
def imports(path, inside_functions):
    """Modules of the package that a file imports, those for type checkers among them."""
    return tuple(names_in(parsed(path), inside_functions))


def names_in(tree, inside_functions):
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nested = {id(n) for f in ast.walk(tree) if isinstance(f, functions) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if (id(node) in nested) != inside_functions:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "billfish":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "billfish")


@every_file
def test_no_arrow_points_up(path):
    room = room_of(name_of(path))
    before = ROOMS[: ROOMS.index(room)] if room in ROOMS else ROOMS if room in LAZY else []
    allowed = {room, *LEAVES, *before} - NEVER.get(room, set())
    for module in imports(path, inside_functions=False):
        assert room_of(module) in allowed, f"{room} imports {module}"
    hidden = {room_of(module) for module in imports(path, inside_functions=True)}
    assert hidden <= (allowed if room in LAZY else {room, *LEAVES}), (
        f"{path.name} imports {hidden} inside a function: that is where cycles hide"
    )


def test_no_import_goes_in_a_circle():
    """Imports inside functions and for type checkers count; a package is what is in its
    __init__."""
    arrows = {
        module: {*imports(path, False), *imports(path, True)} - {module}
        for module, path in MODULES.items()
        if room_of(module) not in LAZY
    }
    done, way = set(), []

    def follow(module):
        assert module not in way, " -> ".join([*way[way.index(module) :], module])
        if module in done or module not in arrows:
            return
        way.append(module)
        for target in sorted(arrows[module]):
            follow(target)
        done.add(way.pop())

    for module in arrows:
        follow(module)


BUILT_ON = {"w4a16": "w4a16_24"}  # its CPU op runs w4a16's on dense codes


def test_only_the_registry_knows_a_scheme():
    """Deleting a scheme's folder and its line breaks nothing else, but a scheme built on it."""
    schemes = [path.name for path in (PACKAGE / "schemes").iterdir() if path.is_dir()]
    for scheme in set(schemes) - {"__pycache__"}:
        folder = PACKAGE / "schemes" / scheme
        for module, path in MODULES.items():
            own = {folder, folder.parent / BUILT_ON.get(scheme, scheme)}
            if not own.isdisjoint(path.parents) or module == "billfish.schemes":
                continue
            for target in (*imports(path, False), *imports(path, True)):
                assert f"billfish.schemes.{scheme}." not in f"{target}.", f"{module}: {target}"
            assert not re.search(rf"\b{scheme.upper()}\b", path.read_text()), module


def test_folders_say_what_they_hold():
    folders = {path.name for path in PACKAGE.rglob("*") if path.is_dir()}
    assert not folders & {"utils", "helpers", "common", "core", "misc"}
    known = {p.name for p in PACKAGE.iterdir() if p.is_dir()} - {"__pycache__", "data"}
    assert known == set(ROOMS)
    assert {path.stem for path in PACKAGE.glob("*.py")} == ROOT_MODULES


@every_file
def test_files_stay_short_and_say_what_they_are(path):
    text = path.read_text()
    assert text.count("\n") <= 400, "split it along an idea"
    assert "fmt: skip" not in text and "fmt: off" not in text
    if path.name not in ("version.py",) and len(text) > 200:
        opening = ast.get_docstring(parsed(path))
        assert opening and opening.count("\n") <= 14, "open with what it holds, in a few lines"


def test_the_median_file_is_read_at_a_sitting():
    assert statistics.median(path.read_text().count("\n") for path in FILES) < 150


@every_file
def test_no_private_name_crosses_a_module(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("billfish"):
            private = [a.name for a in node.names if a.name.startswith("_") and a.name[1] != "_"]
            assert not private, f"{node.module}: {private}"


def test_the_docs_name_every_room_and_file():
    told = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    for module, path in MODULES.items():
        if path.name != "__init__.py" and path.stem != "version":
            assert re.search(rf"\b{path.stem}\b", told), (
                f"docs/ARCHITECTURE.md: no word of {module}"
            )
    assert all(f"{room}/" in told for room in ROOMS)
    for name in ("docs/FORMAT.md", "docs/LOG.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        assert (ROOT / name).exists()


def test_test_files_have_names_of_their_own():
    """pytest imports them by name: of two files with one name it collects only the first."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]
