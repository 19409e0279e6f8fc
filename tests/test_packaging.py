"""Whatever the package imports, pyproject.toml declares."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def declared():
    extras = PROJECT["optional-dependencies"]
    lists = [PROJECT["dependencies"], *(extras[name] for name in extras if name != "test")]
    return {normalized(Requirement(one).name) for each in lists for one in each}


def imports():
    """Top-level module -> the files that import it, of third-party modules."""
    found = {}
    for path in sorted((ROOT / "billfish").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for top in {name.partition(".")[0] for name in names}:
                if top not in sys.stdlib_module_names and top != "billfish":
                    found.setdefault(top, []).append(str(path.relative_to(ROOT)))
    return found


def test_every_import_is_declared():
    distributions = packages_distributions()
    missing = {
        name: files
        for name, files in imports().items()
        if not declared() & set(map(normalized, distributions.get(name, [name])))
    }
    assert not missing


def test_what_is_declared_is_pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {normalized(line.partition("==")[0]) for line in lines}
    assert declared() <= pins
