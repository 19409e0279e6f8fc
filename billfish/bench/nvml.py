"""Driver, clocks, power and temperature of a GPU, through NVML. Values are read, never set.

nvidia-ml-py is optional, and so is each value: what the library, the driver or the card does not
report is None.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def library() -> Any:
    """pynvml, initialised; None where it or the driver is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # ImportError, or one of NVML's own: a benchmark runs without readings
        return None
    return pynvml


def driver_version() -> str | None:
    nvml = library()
    return None if nvml is None else _value(nvml.nvmlSystemGetDriverVersion)


def readings(device: torch.device) -> dict[str, Any] | None:
    nvml, uuid = library(), getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if nvml is None or uuid is None:
        return None
    card = _value(nvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}")
    if card is None:
        return None
    milliwatts = _value(nvml.nvmlDeviceGetPowerUsage, card)
    limit = _value(nvml.nvmlDeviceGetPowerManagementLimit, card)
    return {
        "sm_mhz": _value(nvml.nvmlDeviceGetClockInfo, card, nvml.NVML_CLOCK_SM),
        "memory_mhz": _value(nvml.nvmlDeviceGetClockInfo, card, nvml.NVML_CLOCK_MEM),
        "most_sm_mhz": _value(nvml.nvmlDeviceGetMaxClockInfo, card, nvml.NVML_CLOCK_SM),
        "watts": None if milliwatts is None else milliwatts / 1000,
        "limit_watts": None if limit is None else limit / 1000,
        "celsius": _value(nvml.nvmlDeviceGetTemperature, card, nvml.NVML_TEMPERATURE_GPU),
    }


def _value(read: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return read(*arguments)
    except Exception:  # NVMLError: not supported, or the card is gone
        return None
