"""A card for tests: times that follow from what it was asked, and a record of the asking."""

import torch

from billfish.bench.timing import Rules, Timing

# Small enough that every linear of a test has a handful of copies.
RULES = Rules(rotating_bytes=1000, least_launches=6, most_launches=24)


class FakeCard:
    """Every call really runs, once: a wrong shape or dtype fails the test."""

    def __init__(self, us=None, name="NVIDIA H200", fails=lambda k, n: False):
        self.device = torch.device("cpu")
        self.us = us or {"pdl": 10.0, "plain": 12.5}
        self.name, self.fails, self.asked = name, fails, []

    def facts(self):
        return {
            "name": self.name,
            "arch": "sm_90a",
            "sm_count": 132,
            "driver": None,
            "memory_bytes": 1,
            "l2_bytes": 1,
            "cuda": None,
            "nvrtc": None,
        }

    def readings(self):
        return {"sm_mhz": 1980.0, "watts": None, "celsius": 40.0}

    def ceilings(self):
        return {
            "read_bytes_per_s": 4.0e12,
            "read_how": "told by the test",
            "flop_per_s": 600e12,
            "flop_how": "told by the test",
        }

    def time(self, calls, launches, mode):
        median = self._us(calls, launches, mode)
        return Timing(median, median * 0.9, median * 1.2, 9)

    def sustain(self, calls, launches, seconds):
        """Slower by a tenth and by 10 MHz a second; the first second has no reading."""
        us = self._us(calls, launches, "pdl")
        self.asked[-1]["seconds"] = seconds
        told = [
            self.readings() | {"sm_mhz": 1980.0 - 10 * i, "watts": 600.0 + i, "other": 1.0}
            for i in range(seconds)
        ]
        return [(us * (1 + i / 10), told[i] if i else None) for i in range(seconds)]

    def _us(self, calls, launches, mode):
        dense = calls[0].func is torch.matmul
        outputs = [call() for call in calls]
        x = calls[0].args[0]
        assert outputs[0].dtype == x.dtype and outputs[0].isfinite().all()
        if self.fails(x.shape[1], outputs[0].shape[1]):
            raise torch.OutOfMemoryError("no room")
        shapes = [
            (call.args[0].shape[1], out.shape[1]) for call, out in zip(calls, outputs, strict=True)
        ]
        self.asked.append(
            {
                "dense": dense,
                "mode": mode,
                "launches": launches,
                "shapes": shapes,
                "m": x.shape[0],
                "outputs": outputs,
            }
        )
        return 40.0 if dense else self.us[mode]
