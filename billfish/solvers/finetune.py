"""Finetuning: trains the codes and scales of one block, which GPTQ has quantized, so that the block
gives what the original block gave (2/4/16-bit paper 3.3; BRECQ, EfficientQAT).

Inputs come from the quantized model, targets from the original one, so a block also makes up for
errors of the blocks before it. Works on any scheme whose solutions are Trainable. Training is kept
only if sequences that it never saw improve; else the block stays as GPTQ left it.
"""

import math
from collections.abc import Mapping
from contextlib import ExitStack

import torch
from torch import Tensor

from billfish.solvers.refining import Gain, Refined, Refining
from billfish.solvers.training import (
    Adam,
    Captured,
    Row,
    Trainable,
    draws,
    joined,
    mixed_precision,
    product_dtype,
    rate,
    reproducible,
    split_held_out,
)

# Chosen on WikiText-2 valid and C4 (SmolLM2, g64, 192 x 1024 tokens of WikiText-2 train, one seed;
# docs/LOG.md 2026-11-17). Perplexity on valid and C4 after distillation, W3 asymmetric: rate of
# scales 5e-4 22.29, 31.7; 1e-3 22.06, 31.5. W4 symmetric: 400 steps 20.22, 27.1; 800 20.34, 27.3;
# rate of codes 5e-3 instead of 2.5e-3 20.31 for 20.26, 27.5 for 27.4.
STEPS = 400  # a block
END_TO_END = 200  # steps of distillation after the last block (offline/distill.py)
TOKENS = 8192  # of a step
CPU_TOKENS = 1024  # that run at once on a CPU, as in offline/driver.py
CODES = 2.5e-3  # rate of positions, in steps of the grid
SCALES = 1e-3  # rate of scales, relative; times what a scheme says (Trainable.scale_rate)
TOLD = 25  # steps between two looks at the loss
SMALL = 2**26  # weights of a block below which a step is captured as a graph


@torch.enable_grad()
def refine(refining: Refining) -> Refined:
    training = _Training(refining)
    before = training.held_out_error()
    note = training.run()
    after = training.held_out_error() if note is None else math.nan
    gain = Gain.of(before, after, note)
    solved = {path: part.settle() for path, part in training.parts.items()} if gain.kept else {}
    return Refined(solved, gain)


class _Training:
    def __init__(self, refining: Refining) -> None:
        self.refining = refining
        self.parts: Mapping[str, Trainable] = {
            path: refining.solved.pop(path).trainable() for path in [*refining.solved]
        }
        self.rows = [
            (x[i : i + 1], y[i : i + 1])
            for x, y in zip(refining.inputs, refining.targets, strict=True)
            for i in range(len(x))
        ]
        self.trained, self.held_out = split_held_out(len(self.rows))
        self.device = self.rows[0][0].device
        self.dtype = product_dtype(self.device, self.rows[0][0].dtype)

    def weights(self) -> dict[str, Tensor]:
        return {path: part.weight(self.dtype) for path, part in self.parts.items()}

    def error(self, x: Tensor, y: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        with mixed_precision(self.device):
            output = self.refining.run(x, weights)
        return relative_error(output, y)

    @torch.no_grad()
    def held_out_error(self) -> float:
        weights = self.weights()
        errors = [self.error(*self.rows[i], weights) for i in self.held_out]
        tokens = [self.rows[i][0].shape[1] for i in self.held_out]
        total = sum(float(e) * n for e, n in zip(errors, tokens, strict=True))
        return total / sum(tokens)

    def run(self) -> str | None:
        """Train; returns why it ended early, or None."""
        steps, parts = self.refining.steps, self.parts.values()
        scales: dict[float, list[Tensor]] = {}
        for part in parts:
            scales.setdefault(SCALES * part.scale_rate, []).extend(part.scales)
        codes = [tensor for part in parts for tensor in part.codes]
        adam = Adam([(codes, CODES), *((tensors, rate) for rate, tensors in scales.items())])
        lengths = [self.rows[i][0].shape[1] for i in self.trained]
        drawn, cuda = draws(lengths, TOKENS, self.refining.seed), self.device.type == "cuda"
        most = len(lengths) if cuda else max(1, CPU_TOKENS // max(lengths))
        captured: Captured | None = None
        size = sum(tensor.numel() for tensor in codes)
        alike = len(set(lengths)) == 1 and not self.refining.routes
        if cuda and alike and size < SMALL:
            captured = Captured(lambda x, y: self.step([(x, y)], adam))
        with ExitStack() as stack:
            stack.callback(adam.end)
            stack.enter_context(reproducible(self.device))
            for done in range(steps):
                adam.set_rate(rate(done, steps))
                batches = joined([self.rows[self.trained[i]] for i in next(drawn)], most)
                loss = captured(*batches[0]) if captured else self.step(batches, adam)
                if done % TOLD == TOLD - 1 or done == steps - 1:
                    if not bool(torch.isfinite(loss)):
                        return f"training diverged before step {done + 1}: kept GPTQ's codes"
                    self.refining.tell(done + 1)
        return None

    def step(self, batches: list[Row], adam: Adam) -> Tensor:
        """One step; returns its loss. Weights are decoded once, for all batches; a weight and its
        gradient are freed when the gradient has reached position and scale."""
        weights = self.weights()
        leaves = {path: weight.detach().requires_grad_() for path, weight in weights.items()}
        tokens = sum(x.shape[:2].numel() for x, _ in batches)
        total = torch.zeros((), device=self.device)
        for x, y in batches:
            loss = self.error(x, y, leaves) * (x.shape[:2].numel() / tokens)
            torch.autograd.backward(loss)
            total += loss.detach_()  # its graph would keep all leaves and gradients
        while weights:
            path, weight = weights.popitem()
            grad = leaves.pop(path).grad
            if grad is not None:  # else an expert that no token of the step reached
                torch.autograd.backward(weight, grad)
        adam.step()
        return total


def relative_error(output: Tensor, target: Tensor) -> Tensor:
    """Squared error of a token's state relative to its square, mean over tokens: a few tokens have
    states a thousand times as large as the others, and would decide alone."""
    error = (output.float() - target.float()).square().mean(-1)
    return (error / (target.float().square().mean(-1) + 1e-8)).mean()
