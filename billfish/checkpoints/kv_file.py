"""The file beside a checkpoint that says what a calibration found of K and V."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from billfish.checkpoints.header import read_header
from billfish.errors import UserError
from billfish.formats.spec import first_nonfinite

KV_FILE = "billfish_kv.safetensors"  # `billfish quantize --kv kv4` writes it


def read_kv(file: Path) -> dict[str, Tensor]:
    """The file's tensors, if it is whole and its numbers are finite."""
    read_header(file)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        problem = first_nonfinite(name, tensor)
        if problem:
            raise UserError(f"{file}: {problem}. Calibrate again: `billfish quantize --kv kv4`.")
    return tensors
