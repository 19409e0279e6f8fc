"""The house rules that a program can check: arrows, folders, lengths, and docs that exist."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "billfish"
# Each room may import the rooms before it, and itself.
ROOMS = [
    "formats",
    "solvers",
    "kernels",
    "schemes",
    "models",
    "engine",
    "server",
    "integrations",
    "evaluate",
    "bench",
]
ALLOWED = {
    "formats": set(),
    "solvers": {"formats", "kernels"},
    "kernels": set(),
    "schemes": {"formats", "solvers", "kernels"},
    "models": {"compute", "formats", "schemes", "kernels"},
    "engine": {"compute", "formats", "kernels", "models"},
    "server": {"engine"},
    "integrations": {"compute", "models", "schemes", "formats"},
    "evaluate": {"compute", "models", "engine"},
    "bench": {"compute", "models", "schemes", "kernels", "engine", "evaluate", "server"},
}
LEAVES = {"errors", "version"}  # may be imported by everyone
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path, inside_functions):
    tree = ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nested = {id(n) for f in ast.walk(tree) if isinstance(f, functions) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if (id(node) in nested) != inside_functions:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("billfish"):
            parts = (node.module or "").split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("billfish."))


def room_of(path):
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_arrow_points_up(path):
    room = room_of(path)
    if room is None:
        return
    for name in imports(path, inside_functions=False):
        assert name in LEAVES | {room} | ALLOWED[room], f"{room} imports {name}"
    hidden = set(imports(path, inside_functions=True)) - {room} - LEAVES
    assert not hidden, f"{path.name} imports {hidden} inside a function: that is where cycles hide"


def test_compute_stands_above_the_models():
    assert set(imports(PACKAGE / "compute.py", False)) <= LEAVES
    assert not set(imports(PACKAGE / "compute.py", True))


def test_nothing_that_serves_imports_the_solvers():
    for path in FILES:
        if room_of(path) in {"models", "integrations", "evaluate", "engine", "server"}:
            assert "solvers" not in set(imports(path, False)), path
    run_time = PACKAGE / "schemes" / "w4a16" / "scheme.py"
    assert "billfish.schemes.w4a16.quantize" not in run_time.read_text()


def test_folders_say_what_they_hold():
    folders = {path.name for path in PACKAGE.rglob("*") if path.is_dir()}
    assert not folders & {"utils", "helpers", "common", "core", "misc"}
    known = {p.name for p in PACKAGE.iterdir() if p.is_dir()} - {"__pycache__", "data"}
    assert known == set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_short_and_say_what_they_are(path):
    text = path.read_text()
    assert text.count("\n") <= 400, "split it along an idea"
    if path.name not in ("version.py",) and len(text) > 200:
        opening = ast.get_docstring(ast.parse(text))
        assert opening and opening.count("\n") <= 14, "open with what it holds, in a few lines"


def test_the_docs_name_every_room_and_file():
    told = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    for path in PACKAGE.iterdir():
        if path.suffix == ".py" and path.name not in ("__init__.py", "version.py"):
            assert path.name in told, f"docs/ARCHITECTURE.md does not know {path.name}"
    assert all(f"{room}/" in told for room in ROOMS)
    assert (ROOT / "docs" / "FORMAT.md").exists() and (ROOT / "docs" / "LOG.md").exists()
