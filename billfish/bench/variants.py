"""The options of `bench generate`, parsed and checked before anything is loaded: weights and KV
cache, batch sizes, lengths, memory.
"""

import math
import re
from dataclasses import dataclass

import torch

from billfish.bench.shapes import words
from billfish.engine.kv.cache import FORMATS
from billfish.errors import UserError
from billfish.models.compute import DTYPES, compute_dtype
from billfish.schemes import DEFAULT, SCHEMES
from billfish.schemes.base import Scheme
from billfish.schemes.registry import with_options

DENSE = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
STORED = "stored"  # as a checkpoint holds them


@dataclass(frozen=True)
class ModelVariant:
    weights: str
    kv: str

    def __str__(self) -> str:
        return f"{self.weights}+{self.kv}"


@dataclass(frozen=True)
class GenerateRequest:
    model: str  # a checkpoint directory; if random a model's name, a config.json or its directory
    random: bool
    variants: tuple[ModelVariant, ...]
    batches: tuple[int | None, ...] = (1, 16, 64)  # None: as many as fit
    input: int = 64
    output: int = 64
    rounds: int = 3
    memory: int | None = None  # bytes, of weights and cache together
    bandwidth: float | None = None  # bytes a second
    dtype: str = "auto"  # to compute with packed or stored weights; dense variants name theirs
    group_size: int = 128
    head_bits: int | None = None  # of a random model's lm_head where its linears are packed
    max_batched_tokens: int | None = None  # of a step; None: the engine's default
    energy: bool = False  # measure joules as well
    price: float | None = None  # of a kilowatt hour, in any currency; for the cost of tokens

    def __post_init__(self) -> None:
        rules = {"input": (self.input, 1), "output": (self.output, 2), "rounds": (self.rounds, 1)}
        if self.max_batched_tokens is not None:
            rules["max-batched-tokens"] = (self.max_batched_tokens, 1)
        for name, (given, least) in rules.items():
            if given < least:
                raise UserError(f"--{name} {given}: give {least} or more.")
        if self.bandwidth is not None and not 0 < self.bandwidth < math.inf:
            raise UserError("--bandwidth: TB/s, above 0, such as 4.54.")
        if self.price is not None and not (self.energy and 0 <= self.price < math.inf):
            raise UserError(f"--price {self.price}: of a kilowatt hour, 0 or more, with --energy.")
        if self.dtype not in ("auto", *DTYPES):
            raise UserError(f"--dtype {self.dtype!r}: known are auto, {', '.join(DTYPES)}.")
        for variant in self.variants:
            if self.random and variant.weights == STORED:
                raise UserError(
                    f"variant {variant}: a random model has no stored weights. Take one of "
                    f"{', '.join(weights_known()[:-1])}, or leave out --config and --random."
                )
            if not self.random and variant.weights != STORED:
                raise UserError(
                    f"variant {variant}: a checkpoint runs with the weights it has. Write "
                    f"{STORED}+{variant.kv}; or take --random, for its shape alone."
                )
        if self.head_bits is not None and not self.random:
            raise UserError(
                f"--head-bits {self.head_bits}: a checkpoint runs with the head it has. Leave it "
                "out, or take --random, for the checkpoint's shape alone."
            )
        if self.head_bits is not None and not any(map(self.head_of, self.variants)):
            told = ", ".join(map(str, self.variants))
            raise UserError(
                f"--head-bits {self.head_bits}: {told} has dense weights, and a dense head. Add a "
                f"variant such as {DEFAULT}+kv16, or leave it out."
            )
        if self.random:
            for variant in self.variants:
                self.scheme(variant)  # raises if the group size is invalid

    def scheme(self, variant: ModelVariant) -> Scheme | None:
        """Of the linears of a random model; None: dense."""
        if variant.weights not in SCHEMES:
            return None
        return with_options(variant.weights, group_size=self.group_size)

    def head_of(self, variant: ModelVariant) -> int | None:
        """Bits of a random model's head; None: dense, as the linears of a dense model."""
        return self.head_bits if variant.weights in SCHEMES else None

    @property
    def tokens(self) -> int:  # of one sequence, prompt and text
        return self.input + self.output


def weights_known() -> tuple[str, ...]:
    return (*DENSE, *SCHEMES, STORED)


def type_of(device: torch.device, dtype: str = "auto") -> torch.dtype:
    """The dtype of a random model, as if stored in fp16 for a GPU and in bf16 for a CPU."""
    stored = torch.float16 if device.type == "cuda" else torch.bfloat16
    return compute_dtype(stored, device, dtype)


def usual(random: bool, device: torch.device, dtype: str = "auto") -> str:
    """The default variants."""
    if not random:
        return f"{STORED}+kv16"
    own = next(name for name, known in DENSE.items() if known == type_of(device, dtype))
    return f"{own}+kv16,{DEFAULT}+kv16"


def parse_variants(text: str) -> tuple[ModelVariant, ...]:
    """ "fp16+kv16,w4a16+kv4" -> variants, each once, in the order given."""
    found: dict[ModelVariant, None] = {}
    known = weights_known()
    for word in words(text):
        weights, _, kv = word.partition("+")
        if weights not in known or kv not in FORMATS:
            raise UserError(
                f"variant {word!r}: is weights+cache, such as w4a16+kv4. Weights: "
                f"{', '.join(weights_known())}; cache: {', '.join(FORMATS)}."
            )
        found[ModelVariant(weights, kv)] = None
    if not found:
        raise UserError(f"variants {text!r}: none given. Give one, such as w4a16+kv16.")
    return tuple(found)


def parse_batches(text: str) -> tuple[int | None, ...]:
    """ "1,16,auto" -> (1, 16, None)."""
    found: dict[int | None, None] = {}
    for word in words(text):
        if word != "auto" and not re.fullmatch(r"0*[1-9]\d*", word):
            raise UserError(
                f"batch {word!r}: numbers from 1, or auto for as many as fit, such as 1,16,64."
            )
        found[None if word == "auto" else int(word)] = None
    if not found:
        raise UserError(f"batch {text!r}: none given. Give numbers, or auto: 1,16,64.")
    return tuple(found)


def parse_bytes(text: str) -> int:
    """ "80GB" -> 80_000_000_000; GiB and its like are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT])(i?)B", text.strip())
    if not found:
        raise UserError(f"memory {text!r}: give a number and kB, MB, GB, TB or KiB's like: 80GB.")
    size = float(found[1]) * (1024 if found[3] else 1000) ** ("kMGT".index(found[2]) + 1)
    return int(size)
