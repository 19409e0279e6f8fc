"""What training adds to a job, for `plan`: time and memory of finetuning the blocks and of
distillation.

Counted from shapes: products, passes over activations and logits, decoding and Adam a weight. Their
rates are measured in a fraction of a second on the job's device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from billfish.models.load import rows_of
from billfish.offline import distill
from billfish.offline.task import Task
from billfish.schemes.registry import quantizer
from billfish.solvers import finetune
from billfish.solvers.training import Adam, product_dtype

# Reads and writes of a linear's input and output in forward and backward, norms and activation
# functions included: a trial program's 1.9 ms a step (SmolLM2, H200) are 20 times them in fp32.
PASSES = 20
LOGIT_PASSES = 12  # over the logits in fp32: two softmaxes, the divergence, their gradients
LOGIT_COPIES = 5  # in fp32 at once: both softmaxes, three temporaries of their divergence
BYTES_TRAINED = 21  # a weight in training in fp32: position, gradient, two moments, decoded, code
BYTES_SOLVED = 5  # a weight that waits for training: the solver's target and its code
BYTES_SCALE = 24  # a trained scale: start, zero, change, gradient, two moments
BYTES_DECODED = 8  # a weight of the block that runs in distillation: steps of the grid, value
LAUNCHES = 60  # kernels a linear in a step of distillation, which is no graph: a guess
LAUNCH = {"cpu": 0.0, "cuda": 7e-6}  # seconds each, a guess
WEIGHTS = {"cpu": (256, 512), "cuda": (8192, 4096)}  # n, k of the layer whose step is timed

Shape = tuple[int, int]  # n, k


@dataclass(frozen=True)
class TrainingRates:
    flops: float  # a second, of products in training's dtype
    byte: float  # seconds to read or write a byte
    weight: float  # seconds a weight and step: decoding, its gradient, Adam


Timer = Callable[[Callable[[], object]], float]  # mean seconds of a call


def measure_training(task: Task, size: int, timed: Timer) -> TrainingRates:
    """`size`: m = n = k of the timed product."""
    device = task.device
    source = torch.Generator(device=device).manual_seed(0)
    left = torch.randn(size, size, device=device, generator=source)
    fast = left.to(product_dtype(device, task.dtype))
    flops = 2 * size**3 / timed(lambda: fast @ fast)
    byte = timed(lambda: left * 2) / (2 * left.nbytes)
    n, k = WEIGHTS[device.type]
    k = next((each for each in range(k, 2 * k) if not task.scheme.refuses(n, each)), k)
    weight = torch.randn(n, k, device=device, generator=source)
    solver = quantizer(task.scheme)
    part = solver.quantize(task.scheme, weight, None, "rtn", task.stored_dtype).trainable()
    adam = Adam([(part.codes, 0.0), (part.scales, 0.0)])

    def step() -> None:
        with torch.enable_grad():
            decoded = part.weight(fast.dtype)
        torch.autograd.backward(decoded, torch.ones_like(decoded))
        adam.step()

    return TrainingRates(flops, byte, timed(step) / (n * k))


def training_seconds(
    task: Task, blocks: Sequence[Sequence[Shape]], tokens: int, rates: TrainingRates
) -> dict[str, float]:
    """`blocks`: the linears of each; `tokens`: of the calibration text."""
    request, every = task.request, [linear for block in blocks for linear in block]
    weights = sum(n * k for n, k in every)
    widths = sum(n + k for n, k in every)
    taught = min(finetune.TOKENS, tokens)
    products = 3 * 2 * weights * taught / rates.flops
    activations = PASSES * 4 * widths * taught * rates.byte
    training = products + activations + weights * rates.weight
    taught = min(distill.TOKENS, tokens)
    logits = rows_of(task.model.model) * taught
    whole = 4 * 2 * (weights + rows_of(task.model.model) * task.hidden_size) * taught
    distillation = whole / rates.flops + PASSES * 4 / 3 * 4 * widths * taught * rates.byte
    distillation += LOGIT_PASSES * 4 * logits * rates.byte + weights * rates.weight
    distillation += len(every) * LAUNCHES * LAUNCH[task.device.type]
    return {
        "training": request.training_steps * training,
        "distillation": request.distillation_steps * distillation,
    }


def training_memory(
    task: Task, blocks: Sequence[Sequence[Shape]], tokens: int, embeddings: int
) -> dict[str, int]:
    """Bytes besides the process and the calibration activations, of which distillation needs only
    those of the original. `embeddings`: of everything outside the blocks."""
    block = max(blocks, key=lambda linears: sum(n * k for n, k in linears))
    weights, widths = sum(n * k for n, k in block), sum(n + k for n, k in block)
    cuda, rows = task.device.type == "cuda", rows_of(task.model.model)
    width = product_dtype(task.device, task.dtype).itemsize
    saved = 2 * widths * width  # a token, for the gradients
    many = _at_once(task, tokens, finetune.TOKENS if cuda else finetune.CPU_TOKENS)
    trained = BYTES_TRAINED * weights + saved * many
    if not task.request.distillation_steps:
        return {"training": trained, "distillation": 0}
    every = [linear for block in blocks for linear in block]
    scales = sum(
        prod(spec.shape)
        for n, k in every
        for spec in task.scheme.tensors(n, k, task.stored_dtype).values()
        if spec.dtype.is_floating_point
    )
    many = _at_once(task, tokens, min(distill.TOKENS, distill.LOGITS[task.device.type] // rows))
    kept = sum(n * k for n, k in every) + BYTES_SCALE * scales + embeddings
    if task.head is not None:  # decoded, beside the original
        kept += task.head.n * task.head.k * task.dtype.itemsize
    states = (len(blocks) * task.hidden_size + LOGIT_COPIES * rows) * 4 * many
    return {
        "training": trained,
        "distillation": kept + states + BYTES_DECODED * weights + saved * many,
    }


def _at_once(task: Task, tokens: int, most: int) -> int:
    """Tokens whose activations a step holds: `most`, or one sequence."""
    return min(tokens, max(most, task.request.seqlen))
