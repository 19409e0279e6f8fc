"""Quantizes the head (lm_head), after the blocks: its codes, and what they cost and save.

Its inputs are known from calibration: what the final norm makes of the last block's outputs, in the
quantized model and in the original. The weight is taken in portions of rows, since a vocabulary
makes it the largest linear of a model.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from billfish.models.tail import HeadInputs
from billfish.offline.activations import Activations
from billfish.offline.task import PackedHead, Task
from billfish.schemes.base import Solved
from billfish.schemes.registry import fields, quantizer
from billfish.solvers.statistics import Statistics

PORTION = 2**25  # weights in fp32 at once: 128 MB, and some copies of them in the solver
ROWS = 64  # a portion has whole runs of them, so that packed zeros fill their words


def solve_head(task: Task, head: PackedHead, activations: Activations) -> Solved:
    """`activations`: outputs of the last block; none without calibration data."""
    statistics = _statistics(task, head, activations) if activations.quantized else None
    method, scheme = task.request.method, head.scheme
    found: Solved = quantizer(scheme).quantize_rows(
        scheme, _portions(task, head), statistics, method, task.stored_dtype
    )
    return found


def _statistics(task: Task, head: PackedHead, activations: Activations) -> Statistics:
    made = Statistics(head.k, task.device)
    with HeadInputs(task.model, head) as inputs:
        for batch, state in enumerate(activations.quantized):
            original = inputs(activations.original[batch]) if activations.original else None
            made.add(inputs(state), original)
    return made


def portion_rows(head: PackedHead) -> int:
    return max(ROWS, PORTION // head.k // ROWS * ROWS)


def _portions(task: Task, head: PackedHead) -> Iterator[Tensor]:
    weight = task.model.read(head.weight)
    for rows in torch.split(weight, portion_rows(head)):
        yield rows.to(task.device).float()


def head_facts(task: Task, head: PackedHead) -> dict[str, Any]:
    """What a packed head costs and saves, for `plan` and the report."""
    specs = head.scheme.tensors(head.n, head.k, task.stored_dtype).values()
    packed, weights = sum(spec.nbytes for spec in specs), head.n * head.k
    dense = weights * task.stored_dtype.itemsize
    return {
        "module": head.module,
        "scheme": fields(head.scheme),
        "bits_per_weight": round(packed * 8 / weights, 4),
        "tied": head.tied,  # in the source: the embedding stays in 16 bits beside it
        "bytes": packed,
        "bytes_added": packed if head.tied else packed - dense,  # to the checkpoint
        "bytes_saved_per_step": dense - packed,  # that decoding reads
    }
