"""What a quantizing job is asked for, and what it tells while it runs."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from billfish.errors import UserError
from billfish.offline.text import SAMPLE
from billfish.schemes import DEFAULT
from billfish.schemes.base import Fitting, Scheme
from billfish.schemes.registry import from_options
from billfish.solvers.methods import METHODS, Method


@dataclass(frozen=True)
class QuantizeRequest:
    """All that decides the result. Equal requests on equal inputs give equal bytes."""

    model: Path
    output: Path | None = None  # `plan` needs none
    scheme: Scheme | Fitting = field(default_factory=lambda: from_options(DEFAULT, {}))
    method: str = "gptq"
    data: str = SAMPLE
    nsamples: int = 128
    seqlen: int = 1024
    seed: int = 0
    device: str = "cpu"
    dtype: str | torch.dtype = "auto"  # that calibration computes in
    # Of scales and of what stays unquantized; None: the model's, bf16 for an fp32 model.
    stored_dtype: torch.dtype | None = None
    kv: str | None = None  # kv4: also calibrate the 4-bit cache, with the same text
    allow_skipped: bool = False  # a group size that leaves many weights in 16 bits

    def __post_init__(self) -> None:
        if self.kv not in (None, "kv4"):
            raise UserError(f"--kv {self.kv}: known is kv4; kv16 and kv8 need no calibration.")
        if self.method not in METHODS:
            raise UserError(f"--method {self.method}: known are {', '.join(METHODS)}.")

    @property
    def how(self) -> Method:
        return METHODS[self.method]


@dataclass(frozen=True)
class Progress:
    """Told to the caller after every linear and every block."""

    block: int
    blocks: int
    linear: str | None = None
    error: float | None = None
    note: str | None = None
    seconds_left: float | None = None
