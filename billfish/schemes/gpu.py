"""What ops of CUDA kernels refuse, for all schemes."""

from typing import Any

import torch

from billfish.errors import UserError
from billfish.kernels import jit
from billfish.kernels.device import HOPPER, index_of
from billfish.schemes.base import Op

AMPERE = (8, 0)  # compute capability


class GpuOp(Op):
    """Takes every layer, and Hopper alone, unless a subclass says otherwise."""

    @classmethod
    def refuses(cls, scheme: Any, n: int, k: int, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"its weights are on {device}; move the model to a GPU with model.to('cuda')."
        if not torch.cuda.is_available():
            return "PyTorch finds no CUDA GPU; `billfish doctor` says why."
        found = torch.cuda.get_device_capability(index_of(device))
        reason = cls.refuses_gpu(scheme, found) or cls.refuses_layer(scheme, n, k)
        if reason is not None:
            return reason
        try:
            jit.version()
        except UserError:
            return "NVRTC, which compiles its kernels, is not here; pip install 'billfish[cuda]'."
        return None

    @classmethod
    def refuses_gpu(cls, scheme: Any, found: tuple[int, int]) -> str | None:
        """`found`: compute capability."""
        if found == HOPPER:
            return None
        return (
            f"its kernels are for Hopper, compute capability 9.0; this GPU has {found[0]}."
            f'{found[1]}. From 8.0 on op="stripe" runs {scheme.name}; op="reference" does '
            "anywhere, slowly."
        )

    @classmethod
    def refuses_layer(cls, scheme: Any, n: int, k: int) -> str | None:
        return None


def at_least(least: tuple[int, int], found: tuple[int, int]) -> str | None:
    """Why a GPU of compute capability `found` is too old; or None."""
    if found >= least:
        return None
    return f"it needs compute capability {least[0]}.{least[1]}; this GPU has {found[0]}.{found[1]}."
