"""A block over the calibration activations, one group of linears after the other.

A group's inputs are wanted after the groups before it have been quantized, and next to them those
of the original block. Run from its start for each of four groups, a block does each product more
than twice. Here a part of it (a child with linears: attention, MLP) whose linears are settled runs
no more: its output, as wide as the hidden state, is kept and handed out instead. A Llama block then
runs once in the original and once in the quantized model, but for gate and up, which run twice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from billfish.models.blocks import Arguments, StreamedModel


class _Left(Exception):
    """Raised by a hook to leave a forward pass once it has seen what it came for."""


@dataclass(frozen=True)
class Part:
    """A child of the block that gives one tensor, alone or first in a tuple."""

    name: str
    linears: frozenset[str]
    needs: frozenset[str]  # these, and those of the children that run before it
    last: str | None  # the linear whose output is the part's own
    rest: tuple[Any, ...] | None  # what follows the tensor in its tuple; None: no tuple

    def output(self, tensor: Tensor) -> Any:
        return tensor if self.rest is None else (tensor, *self.rest)


@dataclass(frozen=True)
class Anatomy:
    """What one pass shows of a block."""

    groups: list[list[str]]  # linears in the order they run, those that read one tensor together
    parts: list[Part]


def anatomy(model: StreamedModel, index: int, probe: Tensor, arguments: Arguments) -> Anatomy:
    block = model.blocks[index]
    linears = [linear.path for linear in model.linears(index)]
    read: list[tuple[Tensor, list[str]]] = []  # holding the tensors keeps their identity unique
    written: list[tuple[Tensor, str]] = []
    outputs: dict[str, list[Any]] = {}  # of children, in the order they run

    def reads(path: str, x: Tensor) -> None:
        for seen, paths in read:
            if same(seen, x):
                paths.append(path)
                return
        read.append((x, [path]))

    handles = []
    for path in linears:
        module = block.get_submodule(path)
        handles.append(
            module.register_forward_pre_hook(lambda m, args, path=path: reads(path, args[0]))
        )
        handles.append(
            module.register_forward_hook(
                lambda m, args, output, path=path: written.append((output, path))
            )
        )
    for name, child in block.named_children():
        handles.append(
            child.register_forward_hook(
                lambda m, args, output, n=name: outputs.setdefault(n, []).append(output)
            )
        )
    model.run(index, probe, arguments)
    for handle in handles:
        handle.remove()
    parts, needs = [], frozenset[str]()
    for name, given in outputs.items():
        inside = frozenset(p for p in linears if p == name or p.startswith(name + "."))
        needs |= inside
        first, *rest = given[0] if isinstance(given[0], tuple) else given[:1]
        # Once a pass, one tensor and as large as the hidden state: that can be kept.
        alone = len(given) == 1 and not any(isinstance(item, Tensor) for item in rest)
        if inside and alone and isinstance(first, Tensor) and first.shape == probe.shape:
            last = next((p for tensor, p in written if p in inside and same(tensor, first)), None)
            after = tuple(rest) if isinstance(given[0], tuple) else None
            parts.append(Part(name, inside, needs, last, after))
    return Anatomy([paths for _, paths in read], parts)


def same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape)


@dataclass
class Walk:
    """One block, the model's own or the original beside it, and the activations that enter it.

    `settled` linears have their final weights. `states` become the block's output at the end.
    """

    model: StreamedModel
    index: int
    block: nn.Module
    states: list[Tensor]  # (batch, length, hidden) each
    arguments: Arguments
    anatomy: Anatomy
    settled: set[str]
    kept: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # (part, batch)
    waiting: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # inputs of a part's last

    def input(self, batch: int, path: str) -> Tensor | None:
        """What one linear is given; None if it is not asked (an expert without tokens)."""
        caught: list[Tensor] = []

        def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            caught.append(args[0])
            raise _Left

        with self._hook(path, see), self._parts(batch):
            self._run(batch)
        part = self._part_ended_by(path)
        if caught and part is not None and caught[0].shape == self.states[batch].shape:
            self.waiting[part.name, batch] = caught[0]
        return caught[0] if caught else None

    def input_and_on(self, batch: int, path: str, to_the_end: bool) -> Tensor | None:
        """The same in a block that is settled anyway: goes on to the end of the linear's part, or
        of the block, so that neither has to run again."""
        caught: list[Tensor] = []
        part = next(
            (p.name for p in self.anatomy.parts if path in p.linears and p.needs <= self.settled),
            None,
        )

        def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            caught.append(args[0])
            if not to_the_end and part is None:
                raise _Left

        with self._hook(path, see), self._parts(batch, None if to_the_end else part):
            output = self._run(batch)
        if to_the_end:
            assert output is not None
            self._leave(batch, output)
        return caught[0] if caught else None

    def settle(self, paths: list[str]) -> None:
        """These linears have their weights: whatever waits for them is what they make of it."""
        self.settled.update(paths)
        for (name, batch), x in self.waiting.items():
            last = next(part.last for part in self.anatomy.parts if part.name == name)
            assert last is not None
            self.kept[name, batch] = self.block.get_submodule(last)(x)
        self.waiting.clear()

    def finish(self) -> None:
        """Every state becomes what the block makes of it."""
        for batch in range(len(self.states)):
            with self._parts(batch):
                output = self._run(batch)
            assert output is not None
            self._leave(batch, output)

    def _leave(self, batch: int, output: Tensor) -> None:
        self.states[batch] = output
        for part in self.anatomy.parts:
            self.kept.pop((part.name, batch), None)

    def _run(self, batch: int) -> Tensor | None:
        try:
            return self.model.run(self.index, self.states[batch], self.arguments, self.block)
        except _Left:
            return None

    def _part_ended_by(self, path: str) -> Part | None:
        """The part that this linear, alone in its group, would settle and whose output it is."""
        alone = [path] in self.anatomy.groups
        for part in self.anatomy.parts:
            if alone and part.last == path and part.needs <= self.settled | {path}:
                return part
        return None

    @contextmanager
    def _hook(self, path: str, see: Any) -> Iterator[None]:
        handle = self.block.get_submodule(path).register_forward_pre_hook(see)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _parts(self, batch: int, leave_after: str | None = None) -> Iterator[None]:
        """While open, a part whose output is kept gives that, and a settled one's is kept."""

        def stand_in(part: Part, forward: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                key = part.name, batch
                if key in self.kept:
                    return part.output(self.kept[key].clone())  # the block may add to it in place
                output = forward(*args, **kwargs)
                if part.needs <= self.settled:
                    tensor = output if isinstance(output, Tensor) else output[0]
                    self.kept[key] = tensor.clone()
                if part.name == leave_after:
                    raise _Left
                return output

            return run

        modules = [self.block.get_submodule(part.name) for part in self.anatomy.parts]
        for part, module in zip(self.anatomy.parts, modules, strict=True):
            module.forward = stand_in(part, module.forward)
        try:
            yield
        finally:
            for module in modules:
                del module.forward


@contextmanager
def listen(block: nn.Module, see: dict[str, Any]) -> Iterator[None]:
    """While open, each linear named shows its inputs, and the forward pass goes on."""
    handles = [
        block.get_submodule(path).register_forward_pre_hook(lambda m, args, s=show: s(args[0]))
        for path, show in see.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


__all__ = ["Anatomy", "Part", "Walk", "anatomy", "listen"]
