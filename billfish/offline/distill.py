"""End-to-end distillation: trains the scales and norms of the whole quantized model so that its
logits follow the original's.

Runs when all blocks are quantized, on their shards. Codes stay as they are, one byte a weight; what
is trained, and has gradients and moments, is one scale a group and the norms: 0.8 % of a model at
group size 128. A block's weights are decoded when it runs, and again when its gradients are
computed (gradient checkpointing), so only one block is ever decoded. The original model does not
run: the outputs of its last block are known from calibration.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from billfish.models.blocks import as_output
from billfish.models.load import rows_of
from billfish.models.passes import rounded_input
from billfish.models.tail import Given, as_blocks
from billfish.offline.streaming import return_freed_memory
from billfish.offline.task import PackedHead, Task
from billfish.schemes.registry import quantizer
from billfish.solvers import straight
from billfish.solvers.refining import Gain
from billfish.solvers.training import (
    Adam,
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

TOKENS = 4096  # of a step
# Of scales and norms, relative. W4 symmetric on WikiText-2 valid and C4 as in solvers/finetune.py:
# 5e-4 20.28, 27.39; 1e-3 20.26, 27.35; 2e-3 20.21, 27.31. 4e-3 gains 0.05 and 0.02 more, but its
# divergence on held-out sequences is hardly smaller than without distillation. 400 steps instead of
# 200: W3 22.02 for 22.06, but 31.56 for 31.51.
RATE = 2e-3
LOGITS = {"cpu": 2**25, "cuda": 2**28}  # logits at once
TOLD = 10  # steps between two looks at the loss


class _Norm:
    """The weight or bias of a norm in training."""

    def __init__(self, start: Tensor) -> None:
        self.start, self.dtype = start.float(), start.dtype
        self.change = torch.zeros_like(self.start)

    def now(self) -> Tensor:
        return straight.changed(self.start, self.change, self.dtype)


class _Block(nn.Module):
    """Stands for a block in the model, with parameters decoded anew for each pass."""

    def __init__(self, block: nn.Module, parameters: Callable[[], dict[str, Tensor]]) -> None:
        super().__init__()
        self.hidden = (block, parameters)  # in a tuple: no submodule, whose parameters are on meta

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.hidden[0], name)

    def forward(self, state: Tensor, *args: Any, **kwargs: Any) -> Any:
        block, parameters = self.hidden

        def run(state: Tensor) -> Any:
            return functional_call(block, parameters(), (state, *args), kwargs)

        return checkpoint(run, state, use_reentrant=False)


class Student:
    """The quantized model with trainable scales and norms."""

    def __init__(self, task: Task, shards: list[Path]) -> None:
        self.model, self.device, self.scheme = task.model, task.device, task.scheme
        self.parts: dict[str, Trainable] = {}  # name of a linear in the checkpoint -> its weight
        self.norms: dict[str, _Norm] = {}  # name of a tensor in the checkpoint -> its value
        self.linears: list[dict[str, Trainable]] = []  # of each block: those that are quantized
        outside = load_file(shards[0], device=str(self.device))
        inside = self.model.prefix + "."
        self.tail = {
            name: self._norm(stored, outside[stored])
            for name, stored in self.model.stored.items()
            if not name.startswith(inside) and _is_norm(self.model.model, name)
        }
        del outside
        # A packed head stays as it is: its codes in fp32 would be the largest part of training.
        self.head = {} if task.head is None else self._decoded_head(task.head, shards[-1])
        quantized = {module for module, _, _, why in task.select_linears() if why is None}
        self.blocks = [
            _Block(block, self._load(index, shard, quantized))
            for index, (block, shard) in enumerate(zip(self.model.blocks, shards[1:], strict=False))
        ]

    def _decoded_head(self, head: PackedHead, shard: Path) -> dict[str, Tensor]:
        tensors = load_file(shard, device=str(self.device))
        parts = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
        weight = head.scheme.dequantize(parts).to(self.model.dtype)
        return {f"{head.module}.weight": weight}

    def _norm(self, stored: str, tensor: Tensor) -> _Norm:
        return self.norms.setdefault(stored, _Norm(tensor))

    def _load(
        self, index: int, shard: Path, quantized: set[str]
    ) -> Callable[[], dict[str, Tensor]]:
        """Parameters of a block, by their names in it."""
        model, prefix = self.model, self.model.block_prefix(index)
        tensors = load_file(shard, device=str(self.device))
        fixed: dict[str, Tensor] = {}
        norms: dict[str, _Norm] = {}
        parts: dict[str, Trainable] = {}
        for name, stored in model.stored.items():
            if not name.startswith(prefix):
                continue
            path, module = name.removeprefix(prefix), name.removesuffix(".weight")
            if module in quantized:
                key = stored.removesuffix(".weight")
                own = {
                    part.rpartition(".")[2]: tensor
                    for part, tensor in tensors.items()
                    if part.rpartition(".")[0] == key
                }
                parts[path] = quantizer(self.scheme).trainable_scales(self.scheme, own)
                self.parts[key] = parts[path]
            elif _is_norm(model.model, name):
                norms[path] = self._norm(stored, tensors[stored])
            else:
                fixed[path] = tensors[stored].to(model.dtype)
        dtype = product_dtype(self.device, model.dtype)
        self.linears.append({path.removesuffix(".weight"): part for path, part in parts.items()})

        def parameters() -> dict[str, Tensor]:
            weights = {path: part.weight(dtype) for path, part in parts.items()}
            return {**fixed, **{p: n.now().to(model.dtype) for p, n in norms.items()}, **weights}

        return parameters

    @contextmanager
    def in_model(self, ids: Tensor) -> Iterator[None]:
        """Within this context the model's blocks are the student's. `ids`: any sequence."""
        self.model.fill("", skip=self.model.prefix + ".")
        self.width = self.model.output_width(ids)
        with ExitStack() as stack:
            stack.enter_context(as_blocks(self.model, self.blocks))
            for block, parts in zip(self.model.blocks, self.linears, strict=True):
                for path, part in parts.items():
                    if part.rounding is not None:
                        stack.enter_context(rounded_input(block, [path], part.rounding))
            yield
        self.model.drop("", skip=self.model.prefix + ".")

    def divergence(self, ids: Tensor, states: Tensor) -> Tensor:
        """KL divergence from the original's logits, nats a token. `states`: what the original's
        last block gave."""
        model, given = self.model.model, {"input_ids": ids, "use_cache": False}
        tail = {name: norm.now().to(self.model.dtype) for name, norm in self.tail.items()}
        tail |= self.head
        with mixed_precision(self.device):
            known = Given(as_output(states, self.width))
            with torch.no_grad(), as_blocks(self.model, [known]):
                wanted = model(**given).logits.float().log_softmax(-1)
            # Not tied: a packed head of its own leaves the embedding as it is.
            output = functional_call(model, tail, (), given, tie_weights=False)
            found = output.logits.float().log_softmax(-1)
        return nn.functional.kl_div(
            found.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True
        )

    def trained_tensors(self) -> dict[str, Tensor]:
        """By their names in the checkpoint."""
        found = {name: norm.now().detach().to(norm.dtype) for name, norm in self.norms.items()}
        for key, part in self.parts.items():
            found |= {f"{key}.{name}": tensor for name, tensor in part.changed().items()}
        return {name: tensor.cpu() for name, tensor in found.items()}


@torch.enable_grad()
def distill(
    task: Task,
    shards: list[Path],  # tensors outside the blocks, then the blocks, then a packed head
    batches: list[Tensor],  # (batch, length) token ids
    states: list[Tensor],  # (batch, length, hidden): outputs of the original's last block
    tell: Callable[[int], None],
) -> tuple[Gain, dict[str, Tensor]]:
    """What it gained, and the tensors of the checkpoint that changed: none unless the divergence on
    held-out sequences became smaller."""
    student, request = Student(task, shards), task.request
    return_freed_memory()
    rows = [
        (ids[i : i + 1].to(task.device), state[i : i + 1])
        for ids, state in zip(batches, states, strict=True)
        for i in range(len(ids))
    ]
    trained, held_out = split_held_out(len(rows))
    scales = [tensor for part in student.parts.values() for tensor in part.scales]
    adam = Adam([(scales, RATE), ([norm.change for norm in student.norms.values()], RATE)])
    lengths = [rows[i][0].shape[1] for i in trained]
    drawn, steps, note = draws(lengths, TOKENS, request.seed), request.distillation_steps, None
    room = LOGITS[task.device.type] // rows_of(task.model.model)  # tokens
    most = max(1, room // max(lengths))

    def held_out_divergence() -> float:
        with torch.no_grad():
            found = [float(student.divergence(*rows[i])) * rows[i][0].numel() for i in held_out]
        return sum(found) / sum(rows[i][0].numel() for i in held_out)

    with student.in_model(rows[0][0]), reproducible(task.device):
        before = held_out_divergence()
        for done in range(steps):
            adam.set_rate(rate(done, steps))
            loss = _step(student, joined([rows[trained[i]] for i in next(drawn)], most), adam)
            if done % TOLD == TOLD - 1 or done == steps - 1:
                if not math.isfinite(float(loss)):
                    note = f"distillation diverged before step {done + 1}: scales are as before"
                    break
                tell(done + 1)
        adam.end()
        after = held_out_divergence() if note is None else math.nan
    gain = Gain.of(before, after, note)
    return gain, student.trained_tensors() if gain.kept else {}


def _step(student: Student, batches: list[Row], adam: Adam) -> Tensor:
    tokens, total = sum(ids.numel() for ids, _ in batches), torch.zeros(())
    for ids, states in batches:
        loss = student.divergence(ids, states) * (ids.numel() / tokens)
        torch.autograd.backward(loss)
        total = total.to(loss.device) + loss.detach()
    adam.step()
    return total


def _is_norm(model: nn.Module, parameter: str) -> bool:
    """Whether it is the weight or bias of a norm."""
    module = model.get_submodule(parameter.rpartition(".")[0])
    return "norm" in type(module).__name__.lower()
