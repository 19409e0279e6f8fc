"""The file in a checkpoint directory with the calibration of the 4-bit KV cache."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from billfish.checkpoints.header import read_header
from billfish.errors import UserError
from billfish.formats.spec import first_nonfinite

KV_FILE = "billfish_kv.safetensors"  # `billfish quantize --kv kv4` writes it


def read_kv(file: Path) -> dict[str, Tensor]:
    """The file's tensors; raises if it is damaged or holds NaN or Inf."""
    read_header(file)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        problem = first_nonfinite(name, tensor)
        if problem:
            raise UserError(f"{file}: {problem}. Calibrate again: `billfish quantize --kv kv4`.")
    return tensors
