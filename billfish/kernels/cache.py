"""Compiled kernels on disk: bytes by key, a digest of everything that determines the bytes.

Cubins run on the GPU, so they are loaded only from a directory that nobody else can write to. An
entry holds its checksum and is renamed into place atomically (os.replace), so that any number of
processes may read and write at once. Nothing here is fatal: without a usable directory entries
live in this process only, and one warning says so.
"""

import hashlib
import os
import re
import stat
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

FORMAT = 1  # of an entry and of what jit.py puts into it
MAGIC = b"billfish cubin\n"
INCLUDE = re.compile(rb"^[ \t]*#[ \t]*include[ \t]*(.*?)[ \t\r]*$", re.MULTILINE)
OURS = re.compile(rb'"(billfish/[\w./]+)"')

_memory: dict[str, bytes] = {}
_told: set[str] = set()


def directory() -> Path:
    """$BILLFISH_CACHE_DIR, else the user's cache directory: ~/.cache/billfish on Linux. Not
    created here."""
    own = os.environ.get("BILLFISH_CACHE_DIR")
    return Path(own).expanduser() if own else user_cache_path("billfish", appauthor=False)


def key_of(source: Path, include: Path, settings: Iterable[str]) -> str:
    """A digest of the source, of all it includes from `include`, and of the settings.

    Of files only the content counts, not path or time: two checkouts of one version share entries.
    """
    digest = hashlib.sha256(b"%d\n" % FORMAT)
    for setting in settings:
        digest.update(b"%d:" % len(setting.encode()) + setting.encode())
    for name, content in _texts(source, include):
        digest.update(b"%d:%s%d:" % (len(name), name, len(content)) + content)
    return digest.hexdigest()


def _texts(source: Path, include: Path) -> Iterator[tuple[bytes, bytes]]:
    """The source and every file it includes, each once, breadth first."""
    waiting, seen = [(b"", source)], {b""}
    while waiting:
        name, path = waiting.pop(0)
        content = path.read_bytes()
        yield name, content
        for found in INCLUDE.findall(content):
            ours = OURS.match(found)
            if not ours:
                raise ValueError(
                    f"{path}: #include {found.decode(errors='replace')}: kernels include "
                    '"billfish/..." alone, since the cache would not see another file change'
                )
            # The compiler reports a missing file, with the line.
            if ours[1] not in seen and (include / os.fsdecode(ours[1])).is_file():
                waiting.append((ours[1], include / os.fsdecode(ours[1])))
            seen.add(ours[1])


def load(key: str) -> bytes | None:
    """What was stored under the key; None if there is nothing or it is damaged."""
    if key in _memory:
        return _memory[key]
    folder = _folder(make=False)
    if folder is None:
        return None
    try:
        with open(folder / key, "rb") as file:
            if not _only_ours(os.fstat(file.fileno())):
                return None
            entry = file.read()
    except OSError:
        return None
    start = len(MAGIC) + hashlib.sha256().digest_size
    content = entry[start:]
    if entry[:start] != MAGIC + hashlib.sha256(content).digest():
        return None
    _memory[key] = content
    return content


def store(key: str, content: bytes) -> None:
    """In memory for this process, and on disk for the next where possible."""
    _memory[key] = content
    folder = _folder(make=True)
    if folder is None:
        return
    temporary = None
    try:
        # No fsync: what a crash of the machine leaves behind has a wrong checksum.
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f"{key[:16]}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(MAGIC + hashlib.sha256(content).digest() + content)
        os.replace(temporary, folder / key)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        _tell(f"{folder}: cannot be written to ({error.strerror})", "Make room or make it writable")


def _folder(make: bool) -> Path | None:
    """The directory of entries, if it exists (or can be made) and nobody else can write to it."""
    top = directory()
    folder = top / "cubin"
    try:
        if make:
            top.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        for place in (top, folder):
            if not _only_ours(place.stat()):
                remedy = f"chmod 700 '{place}', if it is yours,"
                _tell(f"{place}: somebody else can write to it", remedy)
                return None
    except OSError as error:
        if make:
            _tell(f"{folder}: cannot be made ({error.strerror})", "Make its parent writable")
        return None
    return folder


def _only_ours(status: os.stat_result) -> bool:
    if not hasattr(os, "getuid"):  # Windows: a user profile is private
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _tell(problem: str, remedy: str) -> None:
    """Once a process: it would be the same for every kernel."""
    if problem not in _told:
        _told.add(problem)
        warnings.warn(
            f"{problem}; compiled kernels are neither loaded from there nor kept, and every "
            f"process compiles its own. {remedy} or set BILLFISH_CACHE_DIR to a directory of "
            "your own.",
            RuntimeWarning,
            stacklevel=2,
        )
