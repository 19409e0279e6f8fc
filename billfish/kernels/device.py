"""Properties of a GPU: architecture, SMs, memory sizes. The only file that queries the GPU.

They are one frozen value, so that the choice of a tile configuration is a pure function that can
be tested without a GPU.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from billfish.errors import UserError

HOPPER = (9, 0)  # compute capability; code for sm_90a runs on no other
RESERVED = 1024  # bytes of shared memory that CUDA reserves for each CTA
ALIGNED = 128  # bytes that shared memory is given in


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    arch: str  # as NVRTC calls it: sm_90a
    sms: int
    smem_per_block: int  # bytes, the opt-in maximum: 227 KB on Hopper
    smem_per_sm: int
    l2_bytes: int

    @property
    def half(self) -> int:
        """Bytes of shared memory of a CTA of which an SM holds two."""
        return self.smem_per_sm // 2 - RESERVED

    @property
    def alone(self) -> int:
        """A little more: an SM holds one such CTA, and one of another kernel."""
        return self.half + ALIGNED


def arch_of(major: int, minor: int) -> str:
    """From Hopper on with an 'a' (architecture-specific): wgmma and its successors need it, and a
    cubin compiled at run time need not run on another GPU."""
    return f"sm_{major}{minor}a" if major >= 9 else f"sm_{major}{minor}"


def capability(arch: str) -> tuple[int, int]:
    """Compute capability of an architecture: sm_90a is (9, 0), sm_100f is (10, 0)."""
    found = re.fullmatch(r"sm_(\d+)(\d)[af]?", arch)
    if not found:
        raise UserError(f"architecture {arch!r}: is named as NVRTC does, such as sm_90a.")
    return int(found[1]), int(found[2])


def index_of(device: torch.device | int | None) -> int:
    """The ordinal; None and a device without an index mean torch's current device."""
    if isinstance(device, int):
        return device
    if device is not None and device.type != "cuda":
        raise ValueError(f"a CUDA device is needed, not {device}")
    if device is not None and device.index is not None:
        return device.index
    return torch.cuda.current_device()


def gpu(device: torch.device | int | None = None) -> Gpu:
    if not torch.cuda.is_available():
        raise UserError("no CUDA GPU that PyTorch can use is here. `billfish doctor` says why.")
    return _gpu(index_of(device))


@lru_cache
def _gpu(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    return Gpu(
        index=index,
        name=found.name,
        arch=arch_of(found.major, found.minor),
        sms=found.multi_processor_count,
        smem_per_block=_number(found, index, "shared_memory_per_block_optin"),
        smem_per_sm=_number(found, index, "shared_memory_per_multiprocessor"),
        l2_bytes=_number(found, index, "L2_cache_size"),
    )


# torch's name -> the driver's. Not every version of torch has these three.
DRIVER_NAMES = {
    "shared_memory_per_block_optin": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "shared_memory_per_multiprocessor": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "L2_cache_size": "L2_CACHE_SIZE",
}


def _number(properties: Any, index: int, name: str) -> int:
    value = getattr(properties, name, None)
    if value is not None:
        return int(value)
    from cuda.bindings import driver

    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{DRIVER_NAMES[name]}")
    code, device = driver.cuDeviceGet(index)
    if int(code) == 0:
        code, number = driver.cuDeviceGetAttribute(attribute, device)
    if int(code) != 0:
        raise RuntimeError(f"cuda:{index}: the driver does not tell {name} ({code!r})")
    return int(number)
