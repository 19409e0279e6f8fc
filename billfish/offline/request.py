"""The request of a quantization job."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from billfish.errors import UserError
from billfish.offline.text import SAMPLE
from billfish.schemes import DEFAULT
from billfish.schemes.base import Fitting, Scheme
from billfish.schemes.registry import from_options
from billfish.solvers import finetune
from billfish.solvers.methods import METHODS, Method


@dataclass(frozen=True)
class QuantizeRequest:
    """Everything that determines the result: equal requests on equal inputs give equal bytes."""

    model: Path
    output: Path | None = None  # None: `plan` only
    scheme: Scheme | Fitting = field(default_factory=lambda: from_options(DEFAULT, {}))
    method: str = "gptq"
    data: str = SAMPLE
    nsamples: int = 128
    seqlen: int = 1024
    seed: int = 0
    device: str = "cpu"
    dtype: str | torch.dtype = "auto"  # compute dtype of the calibration passes
    # Dtype of stored scales and of tensors left unquantized; None: the model's, or bf16 for fp32.
    stored_dtype: torch.dtype | None = None
    head_bits: int | None = None  # 8 or 4: pack the head (lm_head), too; None: it stays in 16 bits
    kv: str | None = None  # kv4: also calibrate the 4-bit KV cache, on the same text
    allow_skipped: bool = False  # accept a scheme that leaves many weights in 16 bits
    steps: int | None = None  # of training each block; None: the method's default
    end_to_end: int | None = None  # steps of distillation; None: the method's default
    check: bool = True  # compare the result with the original; changes no tensor

    def __post_init__(self) -> None:
        if self.kv not in (None, "kv4"):
            raise UserError(f"--kv {self.kv}: known is kv4; kv16 and kv8 need no calibration.")
        if self.method not in METHODS:
            raise UserError(f"--method {self.method}: known are {', '.join(METHODS)}.")
        for option, value in (("--steps", self.steps), ("--end-to-end", self.end_to_end)):
            if value is not None and self.how.refine is None:
                raise UserError(
                    f"{option} {value}: --method {self.method} does not train. Leave it out, or "
                    "give --method finetune."
                )
            if value is not None and value < 0:
                raise UserError(f"{option} {value}: is 0 or more.")

    @property
    def how(self) -> Method:
        return METHODS[self.method]

    @property
    def training_steps(self) -> int:
        usual = finetune.STEPS if self.how.refine else 0
        return usual if self.steps is None else self.steps

    @property
    def distillation_steps(self) -> int:
        usual = finetune.END_TO_END if self.how.refine else 0
        return usual if self.end_to_end is None else self.end_to_end
