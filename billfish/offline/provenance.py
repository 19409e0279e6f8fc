"""Provenance of a result: digests of the inputs and versions of the libraries that computed it.

Jobs with equal provenance and settings give equal bytes; the driver resumes a job only if they are
equal.
"""

import hashlib
import platform
from pathlib import Path

import torch
import transformers

from billfish.checkpoints.write import sha256
from billfish.version import __version__


def data_digest(source: str) -> str:
    """Name and sha256 of a calibration file, wherever it is; the name of a hub data set."""
    path = Path(source).expanduser()
    return f"{path.name} {sha256(path)}" if path.is_file() else source


def sampled_digest(paths: list[Path], pieces: int = 16, length: int = 4096) -> str:
    """sha256 of evenly spaced pieces of every file: tells fine-tunes of one model apart without
    reading all of it."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for piece in range(pieces):
                file.seek(max(0, size - length) * piece // (pieces - 1))
                digest.update(file.read(length))
    return digest.hexdigest()


def versions() -> dict[str, str]:
    return {
        "billfish": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
