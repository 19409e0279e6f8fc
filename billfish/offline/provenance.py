"""Where a result comes from: digests of the inputs and versions of what computed it.

Two jobs with the same provenance and settings give the same bytes; the driver resumes only then.
"""

import hashlib
import platform
from pathlib import Path

import torch
import transformers

from billfish.checkpoints.write import sha256
from billfish.version import __version__


def data_digest(source: str) -> str:
    """A calibration file by what is in it, not by where it lies; a name by itself."""
    path = Path(source).expanduser()
    return f"{path.name} {sha256(path)}" if path.is_file() else source


def sampled_digest(paths: list[Path], pieces: int = 16, length: int = 4096) -> str:
    """Pieces of every file, evenly spread: tells finetunes of one shape apart, reading little."""
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
