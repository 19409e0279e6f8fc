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


def joules(device: torch.device) -> float | None:
    """Energy that the card has used since its driver was loaded. Counters move every few tens of
    milliseconds: measure for a second or longer."""
    if device.type != "cuda" or (card := _card(device)) is None:
        return None
    millijoules = _value(library().nvmlDeviceGetTotalEnergyConsumption, card)
    return None if millijoules is None else millijoules / 1000


def readings(device: torch.device) -> dict[str, Any] | None:
    nvml, card = library(), _card(device)
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


def _card(device: torch.device) -> Any:
    nvml, uuid = library(), getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if nvml is None or uuid is None:
        return None
    return _value(nvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}")


def _value(read: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return read(*arguments)
    except Exception:  # NVMLError: not supported, or the card is gone
        return None
