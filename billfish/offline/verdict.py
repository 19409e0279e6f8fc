"""What the sentinel measured, and when it calls a model broken.

Few bits lose much and break nothing, so both rules compare with models that know nothing (figures
of every scheme: docs/LOG.md).

    answers   KL at least that of a model to which all tokens are equally likely. SmolLM2 has 7.6
              nats there: 0.2 in 4 bits, but 9 to 11 rounded to 2 bits.
    a block   alone, on the original's inputs: a squared error of UNRELATED times what it adds to
              the states, as the output of another model's block would have; a block left out has
              1. Or JUMP times the median of all blocks, if that is no small error: one of SmolLM2
              in 4 bits has 0.003 to 0.04, with one scale doubled 0.75, without attention 0.31.
    an expert alone, on the original's tokens, relative to its output: UNRELATED, and JUMP times the
              median of all experts. GPTQ on few tokens leaves single ones far from the others: 30
              times their median in a random mixture in 4 bits, an error of 1.01 (docs/LOG.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

UNRELATED = 2.0
JUMP, LEAST = 6.0, 0.1
NAMED = 4  # experts, in a sentence


@dataclass(frozen=True)
class Block:
    index: int
    own: float  # error alone, relative to what the block adds; median over tokens
    states: float  # error of the quantized model's states behind it, relative; median

    def figures(self) -> dict[str, Any]:
        errors = {"own_error": rounded(self.own), "states_error": rounded(self.states)}
        return {"block": self.index, **errors}

    @property
    def broken(self) -> bool:
        return not self.own < UNRELATED  # nor is NaN


@dataclass(frozen=True)
class Expert:
    name: str
    own: float  # error alone, relative to its output; median over tokens
    tokens: int


@dataclass(frozen=True)
class Answers:
    """Next tokens of both models after the same texts."""

    kl: float  # from the original to the quantized model, nats a token
    uniform: float  # from the original to equally likely tokens
    tokens: int
    same: int  # of them: the most likely token is the same

    @classmethod
    def of(cls, wanted: Tensor, found: Tensor) -> "Answers":
        """Of log probabilities, (tokens, vocabulary) each."""
        likely, tokens = wanted.exp(), len(wanted)
        kl = torch.nn.functional.kl_div(found, wanted, reduction="batchmean", log_target=True)
        uniform = float((likely * wanted).sum(-1).mean()) + math.log(wanted.shape[1])
        same = int((wanted.argmax(-1) == found.argmax(-1)).sum())
        return cls(float(kl), uniform, tokens, same)

    def figures(self) -> dict[str, Any]:
        kl = {"kl": rounded(self.kl), "kl_uniform": rounded(self.uniform)}
        return {**kl, "greedy_tokens": self.tokens, "greedy_same": self.same}

    @property
    def broken(self) -> bool:
        return not self.kl < self.uniform


NO_ANSWERS = dict.fromkeys(("kl", "kl_uniform", "greedy_tokens", "greedy_same"))


def rounded(value: float) -> float | None:
    """To four digits; None if it is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def expert_figures(experts: Sequence[Expert]) -> dict[str, Any] | None:
    """Of all experts, and of those that fail; None for a model without any."""
    if not experts:
        return None
    wrong = [
        {"name": each.name, "error": rounded(each.own), "tokens": each.tokens}
        for each in failing(experts)
    ]
    largest = max((each.own for each in experts if math.isfinite(each.own)), default=math.nan)
    known = {"median_error": rounded(_median(experts)), "largest_error": rounded(largest)}
    return {"count": len(experts), **known, "faults": wrong}


def verdict(
    blocks: list[Block], answers: Answers | None, prefix: str, experts: Sequence[Expert] = ()
) -> str | None:
    """In sentences what is broken, and where it begins; None if nothing is. `prefix`: of the
    blocks' names."""
    said, wrong, lost = [], faults(blocks), failing(experts)
    if answers is not None and answers.broken:
        said.append(
            f"the quantized model writes noise: KL to the original is {_number(answers.kl)} nats a "
            f"token, equally likely tokens would have {answers.uniform:.3g}; "
            f"{answers.same} of {answers.tokens} most likely tokens are the same."
        )
    usual = _median(blocks)
    for block in wrong[:1]:
        more = f" So do {len(wrong) - 1} later blocks." if wrong[1:] else ""
        rule = f"a block of another model has {UNRELATED:g}" if block.broken else "it stands out"
        said.append(
            f"{prefix}.{block.index} begins to fail: on the original's inputs its error is "
            f"{_number(block.own)} times what it adds, the median of all blocks is "
            f"{_number(usual)}; {rule}.{more} Quantize it again, or report it."
        )
    for expert in lost[:1]:
        more = ", ".join(each.name for each in lost[1:NAMED])
        more = f", then {more}{', ...' if lost[NAMED:] else ''}" if more else ""
        said.append(
            f"{len(lost)} of {len(experts)} experts fail, first {expert.name}{more}: on "
            f"{expert.tokens} of the original's tokens its error is {_number(expert.own)} times "
            f"its output, the median of all experts is {_number(_median(experts))}. Quantize the "
            "model again, or report it."
        )
    if said and not wrong and not lost:
        worst = max(blocks, key=lambda block: block.own)
        said.append(
            f"No block stands out, their errors add up; that of {prefix}.{worst.index} is the "
            f"largest, {worst.own:.3g} times what it adds. Give more bits, smaller groups or "
            "another --method."
        )
    return " ".join(said) or None


def faults(blocks: list[Block]) -> list[Block]:
    """Blocks that are broken, or whose errors are out of line with those of the others."""
    line = max(JUMP * _median(blocks), LEAST)
    return [block for block in blocks if block.broken or block.own >= line]


def failing(experts: Sequence[Expert]) -> list[Expert]:
    line = max(JUMP * _median(experts), UNRELATED)
    return [expert for expert in experts if not expert.own < line]  # nor is NaN


def _median(parts: Sequence[Block] | Sequence[Expert]) -> float:
    return median([part.own for part in parts if math.isfinite(part.own)] or [math.inf])


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not finite"
