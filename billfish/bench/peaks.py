"""Peaks of cards: the datasheet's; for a card that is not in the table what a run measured, and the
result says so."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Peaks:
    bytes_per_s: float
    flop_per_s: float
    source: str = "datasheet"

    def floor_us(self, nbytes: float, flop: float) -> float:
        return max(nbytes / self.bytes_per_s, flop / self.flop_per_s) * 1e6

    def doubled(self) -> "Peaks":
        """For products of int8 numbers, and of 2:4 sparse weights: twice as many a second (of int8
        GeForce four times: there it is no peak)."""
        return replace(self, flop_per_s=2 * self.flop_per_s)


# Memory, and dense fp16 tensor cores with fp32 accumulation, by the driver's full name of the card:
# an "RTX 4090 Laptop GPU" is slower than an "RTX 4090".
DATASHEET = {
    "NVIDIA H200": Peaks(4.8e12, 990e12),
    "NVIDIA H100 80GB HBM3": Peaks(3.35e12, 990e12),  # SXM
    "NVIDIA H100 PCIe": Peaks(2.0e12, 756e12),
    "NVIDIA A100-SXM4-80GB": Peaks(2.039e12, 312e12),
    "NVIDIA A100 80GB PCIe": Peaks(1.935e12, 312e12),
    "NVIDIA L40S": Peaks(0.864e12, 362e12),
    "NVIDIA GeForce RTX 4090": Peaks(1.008e12, 165e12),
    "NVIDIA GeForce RTX 3090": Peaks(0.936e12, 71e12),
}


def peaks_of(name: str, ceilings: dict[str, Any]) -> Peaks:
    measured = Peaks(
        ceilings["read_bytes_per_s"], ceilings["flop_per_s"], "measured in this run: card unknown"
    )
    return DATASHEET.get(name, measured)
