"""The cache of compiled kernels: keys, damage, many processes, directories that cannot be used."""

import errno
import os
import stat
import subprocess
import sys
import warnings

import pytest

from billfish.kernels import cache

KEY = "k" * 64


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    place = tmp_path / "deep" / "cache"
    monkeypatch.setenv("BILLFISH_CACHE_DIR", str(place))
    fresh(monkeypatch)
    monkeypatch.setattr(cache, "_told", set())
    return place


def fresh(monkeypatch):
    """As another process would begin."""
    monkeypatch.setattr(cache, "_memory", {})


def test_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("BILLFISH_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.directory() == tmp_path / ".cache" / "billfish"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")
    assert str(cache.directory()) == "/var/caches/billfish"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, the standard says
    assert cache.directory() == tmp_path / ".cache" / "billfish"
    monkeypatch.setenv("BILLFISH_CACHE_DIR", "~/own")
    assert cache.directory() == tmp_path / "own"


# -- keys


@pytest.fixture
def files(tmp_path):
    include = tmp_path / "include"
    (include / "billfish").mkdir(parents=True)
    (include / "billfish" / "a.cuh").write_text('#pragma once\n#include "billfish/b.cuh"\n')
    (include / "billfish" / "b.cuh").write_text('#pragma once\n  # include "billfish/a.cuh"\n')
    (include / "billfish" / "unused.cuh").write_text("1\n")
    source = tmp_path / "kernel.cuh"
    source.write_text('// a kernel\n#include "billfish/a.cuh"\n')
    return source, include


def test_key_is_what_decides_the_code(files):
    source, include = files
    seen = {cache.key_of(source, include, ("name", "sm_90a"))}
    seen.add(cache.key_of(source, include, ("name", "sm_80")))
    seen.add(cache.key_of(source, include, ("names", "m_90a")))
    for path in (source, include / "billfish" / "a.cuh", include / "billfish" / "b.cuh"):
        path.write_text(path.read_text() + "// changed\n")
        seen.add(cache.key_of(source, include, ("name", "sm_90a")))
    assert len(seen) == 6


def test_key_is_not_more_than_that(files, tmp_path):
    source, include = files
    before = cache.key_of(source, include, ("name",))
    (include / "billfish" / "unused.cuh").write_text("2\n")
    assert cache.key_of(source, include, ("name",)) == before
    moved = tmp_path / "elsewhere"
    include.rename(moved)
    os.utime(source, (0, 0))
    assert cache.key_of(source, moved, ("name",)) == before


def test_other_includes_are_refused(files):
    source, include = files
    for line in ('#include "sibling.cuh"', "#include <cuda_fp16.h>", "#include MACRO"):
        source.write_text(line + "\n")
        with pytest.raises(ValueError, match="include"):
            cache.key_of(source, include, ())
    source.write_text('#include "billfish/gone.cuh"\n')  # the compiler will say so, with the line
    assert cache.key_of(source, include, ())


# -- entries


def test_what_was_stored_is_loaded(place, monkeypatch):
    assert cache.load(KEY) is None
    assert not place.exists()  # looking makes nothing
    cache.store(KEY, b"code\n\0\xff")
    fresh(monkeypatch)
    assert cache.load(KEY) == b"code\n\0\xff"
    assert stat.S_IMODE(place.stat().st_mode) == stat.S_IMODE((place / "cubin").stat().st_mode)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert [path.name for path in (place / "cubin").iterdir()] == [KEY]


def test_damage_is_ignored_and_healed(place, monkeypatch):
    content = bytes(range(256)) * 8
    cache.store(KEY, content)
    entry = place / "cubin" / KEY
    whole = entry.read_bytes()
    flipped = bytearray(whole)
    flipped[-9] ^= 1
    damaged = [whole[:size] for size in (0, 1, 15, 40, 47, 48, len(whole) - 1)]
    for bad in [*damaged, whole + b"\0", bytes(flipped), content]:
        entry.write_bytes(bad)
        fresh(monkeypatch)
        assert cache.load(KEY) is None
    cache.store(KEY, content)
    fresh(monkeypatch)
    assert cache.load(KEY) == content


WORKER = """
import sys
from billfish.kernels import cache
content = bytes(range(256)) * 4096
found = 0
for i in range(60):
    cache.store(sys.argv[1], content)
    cache._memory.clear()
    got = cache.load(sys.argv[1])
    assert got == content, None if got is None else len(got)
"""


def test_processes_at_once(place):
    """Each always finds the whole entry: never a part of another's."""
    command = [sys.executable, "-W", "error", "-c", WORKER, KEY]
    workers = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(4)]
    for worker in workers:
        _, said = worker.communicate(timeout=120)
        assert worker.returncode == 0, said.decode()
    assert [path.name for path in (place / "cubin").iterdir()] == [KEY]


# -- directories that cannot be used


@pytest.mark.parametrize("which", ["top", "folder"])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_no_code_from_where_others_can_write(place, monkeypatch, which, mode):
    cache.store(KEY, b"code")
    (place if which == "top" else place / "cubin").chmod(mode)
    fresh(monkeypatch)
    with pytest.warns(RuntimeWarning, match="chmod 700"):
        assert cache.load(KEY) is None
    cache.store("other", b"code")
    assert cache.load("other") == b"code"  # from memory
    assert not (place / "cubin" / "other").exists()


def test_no_code_of_somebody_else(place, monkeypatch):
    cache.store(KEY, b"code")
    fresh(monkeypatch)
    monkeypatch.setattr(os, "getuid", lambda: place.stat().st_uid + 1)
    with pytest.warns(RuntimeWarning, match="somebody else can write"):
        assert cache.load(KEY) is None


def test_no_entry_that_others_can_write(place, monkeypatch):
    cache.store(KEY, b"code")
    (place / "cubin" / KEY).chmod(0o666)
    fresh(monkeypatch)
    assert cache.load(KEY) is None


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
@pytest.mark.parametrize("step", ["mkdir", "mkstemp", "replace"])
def test_a_directory_that_cannot_be_written_to(place, monkeypatch, step, code):
    def fail(*args, **options):
        raise OSError(code, os.strerror(code))

    where = {"mkdir": cache.Path, "mkstemp": cache.tempfile, "replace": cache.os}[step]
    monkeypatch.setattr(where, step, fail)
    with pytest.warns(RuntimeWarning, match=os.strerror(code)) as said:
        cache.store(KEY, b"code")
        cache.store("other", b"code")
    assert len(said) == 1  # once, not for every kernel
    assert cache.load(KEY) == b"code"
    assert not place.exists() or list((place / "cubin").iterdir()) == []


def test_a_file_in_the_way(place, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BILLFISH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.load(KEY) is None  # nothing is there: no reason to warn
    with pytest.warns(RuntimeWarning, match="BILLFISH_CACHE_DIR"):
        cache.store(KEY, b"code")
    assert cache.load(KEY) == b"code"
