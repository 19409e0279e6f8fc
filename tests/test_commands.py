"""The README's two commands leave each other alone, whichever runs first."""

import subprocess
import sys
from pathlib import Path

import pytest
from demo import DEMO

ROOT = Path(__file__).parents[1]


def test_nothing_takes_the_demo_for_code():
    assert len(DEMO.parts) == 1 and not DEMO.name.isidentifier()
    assert f"{DEMO}/" in (ROOT / ".gitignore").read_text().split()
    assert f" {DEMO} " in (ROOT / "Makefile").read_text(), "make clean leaves it"


@pytest.mark.parametrize("folder", ["demo", "demo-output", "torch", "other"])
def test_folders_do_not_change_the_order_of_imports(tmp_path, folder):
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / folder).mkdir()
    file = tmp_path / "tests" / "test_some.py"
    file.parent.mkdir()
    file.write_text("import torch\nfrom demo import smollm2\n\nimport billfish\n")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "I", "."]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
