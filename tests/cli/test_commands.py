"""The README's two commands: in either order, with or without a C++ compiler."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import cpp_compiler
import pytest
from demo import DEMO

ROOT = Path(__file__).parents[2]


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


def test_a_compiler_is_found_by_name_or_comes_as_a_package(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cpp_compiler.find() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "ziglang")
    assert cpp_compiler.find() == [sys.executable, "-m", "ziglang", "c++"]
    for name in ("c++", "clang++", "g++"):  # the last goes first
        (tmp_path / name).touch(mode=0o755)
        assert cpp_compiler.find() == [name]
    monkeypatch.setenv("CXX", "ccache 'a compiler' -m64")
    assert cpp_compiler.find() == ["ccache", "a compiler", "-m64"]


def test_make_brings_a_compiler_where_there_is_none(pytestconfig):
    ran = subprocess.run(
        [sys.executable, ROOT / "tests" / "cpp_compiler.py"],
        env={**os.environ, "CXX": "", "PATH": ""},
        capture_output=True,
        text=True,
    )
    found = importlib.util.find_spec("ziglang") is not None
    assert (ran.returncode == 0) == found and "ziglang" in ran.stdout
    assert "cpp_compiler.py || $(PIP) -c constraints.txt ziglang" in (ROOT / "Makefile").read_text()
    assert "\nziglang==" in (ROOT / "constraints.txt").read_text()
    assert "-rs" in pytestconfig.getini("addopts"), "nobody sees why tests were skipped"
