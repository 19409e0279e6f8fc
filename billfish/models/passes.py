"""Runs a block over the calibration activations to catch the inputs of one input group after the
other.

GPTQ needs a group's inputs in the original block, and in the block whose earlier groups are already
quantized. Running the block from its start for each of its four groups would do every product more
than twice. So the output of a part (a child with linears: attention, MLP) is cached once all its
linears have their final weights. A Llama block then runs once in the original and once in the
quantized model, except for gate and up, which run twice.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from billfish.models.blocks import Arguments, StopForward, StreamedModel
from billfish.models.experts import Experts, idle_experts

# Hidden states (tokens, hidden), and experts and their weights (tokens, experts a token)
Call = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Part:
    """A child of the block, or Experts, whose output is one tensor, alone or first in a tuple."""

    name: str
    linears: frozenset[str]
    needs: frozenset[str]  # linears that its output depends on: its own and those that ran before
    last: str | None  # the linear whose output is the part's output
    rest: tuple[Any, ...] | None  # the rest of the output tuple; None: the output is a tensor

    def output(self, tensor: Tensor) -> Any:
        return tensor if self.rest is None else (tensor, *self.rest)


@dataclass(frozen=True)
class BlockStructure:
    """Structure of a block, found by one forward pass."""

    # Linears in execution order; those that read one tensor are a group, as are those of Experts.
    groups: list[list[str]]
    parts: list[Part]
    experts: list[str]  # paths of Experts

    def experts_of(self, group: list[str]) -> str | None:
        """The Experts whose linears these are."""
        return next((path for path in self.experts if group[0].startswith(f"{path}.")), None)


def probe_structure(
    model: StreamedModel, index: int, probe: Tensor, arguments: Arguments
) -> BlockStructure:
    block = model.blocks[index]
    linears = [linear.path for linear in model.linears(index)]
    experts = {path: m for path, m in block.named_modules() if isinstance(m, Experts)}
    owned = {
        path: [linear for linear in linears if linear.startswith(f"{path}.")] for path in experts
    }
    routed = {linear for some in owned.values() for linear in some}
    read: list[tuple[Tensor, list[str]]] = []  # references keep data pointers unique
    written: list[tuple[Tensor, str]] = []
    outputs: dict[str, list[Any]] = {}  # by child, and experts; in execution order

    def reads(path: str, x: Tensor) -> None:
        for seen, paths in read:
            if same(seen, x):
                paths.append(path)
                return
        read.append((x, [path]))

    def wrote(path: str, output: Any) -> None:
        if isinstance(output, Tensor):  # PhiMoE's router is a linear that returns a tuple
            written.append((output, path))

    handles = []
    for path in (path for path in linears if path not in routed):
        module = block.get_submodule(path)
        handles.append(
            module.register_forward_pre_hook(lambda m, args, path=path: reads(path, args[0]))
        )
        handles.append(
            module.register_forward_hook(lambda m, args, output, path=path: wrote(path, output))
        )
    for path, module in experts.items():
        handles.append(
            module.register_forward_pre_hook(
                lambda m, args, path=path: read.append((args[0].clone(), owned[path]))
            )
        )
    for name, child in [*block.named_children(), *experts.items()]:
        handles.append(
            child.register_forward_hook(
                lambda m, args, output, n=name: outputs.setdefault(n, []).append(output)
            )
        )
    with idle_experts(block):
        model.run(index, probe, arguments)
    for handle in handles:
        handle.remove()
    parts, needs = [], frozenset[str]()
    for name, given in outputs.items():
        inside = frozenset(p for p in linears if p == name or p.startswith(name + "."))
        needs |= inside
        first, *rest = given[0] if isinstance(given[0], tuple) else given[:1]
        # Cache only children that run once a pass and return one tensor of the hidden state's
        # shape.
        alone = len(given) == 1 and not any(isinstance(item, Tensor) for item in rest)
        whole = isinstance(first, Tensor) and first.numel() == probe.numel()
        if inside and alone and whole and (name in experts or first.shape == probe.shape):
            last = next((p for tensor, p in written if p in inside and same(tensor, first)), None)
            after = tuple(rest) if isinstance(given[0], tuple) else None
            parts.append(Part(name, inside, needs, last, after))
    return BlockStructure([paths for _, paths in read], parts, [*experts])


def same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape)


@dataclass
class BlockRunner:
    """Runs one block, the one being quantized or a copy of the original, over its inputs.

    `final` names the linears whose weights will not change any more. `states` hold the block's
    inputs, which its outputs replace at the end.
    """

    model: StreamedModel
    index: int
    block: nn.Module
    states: list[Tensor]  # (batch, length, hidden) each
    arguments: Arguments
    structure: BlockStructure
    final: set[str]
    cached: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # outputs by (part, batch)
    # (part, batch) -> input of the part's last linear, until that linear is quantized
    pending: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def input(self, batch: int, path: str) -> Tensor | None:
        """Input of one linear, where the pass stops; None if it does not run (an expert without
        tokens)."""
        caught: list[Tensor] = []

        def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            caught.append(args[0])
            raise StopForward

        with self._hook(path, see), self._parts(batch):
            self._run(batch)
        part = self._part_ended_by(path)
        if caught and part is not None and caught[0].shape == self.states[batch].shape:
            self.pending[part.name, batch] = caught[0]
        return caught[0] if caught else None

    def input_and_continue(self, batch: int, path: str, whole_block: bool) -> Tensor | None:
        """Input of one linear of a block whose weights are final. The pass continues to the end of
        the linear's part, or of the whole block, so that neither has to run again."""
        caught: list[Tensor] = []
        part = next(
            (p.name for p in self.structure.parts if path in p.linears and p.needs <= self.final),
            None,
        )

        def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            caught.append(args[0])
            if not whole_block and part is None:
                raise StopForward

        with self._hook(path, see), self._parts(batch, None if whole_block else part):
            output = self._run(batch)
        if whole_block:
            assert output is not None
            self._set_output(batch, output)
        return caught[0] if caught else None

    def routing(self, batch: int, experts: str) -> Call:
        """What a router gives its Experts, where the pass stops."""
        caught: list[Call] = []

        def see(module: nn.Module, args: Call) -> None:
            caught.append(args)
            raise StopForward

        with self._hook(experts, see), self._parts(batch):
            self._run(batch)
        return caught[0]

    def mark_final(self, paths: list[str]) -> None:
        """These linears now have their final weights: compute the outputs that were pending."""
        self.final.update(paths)
        for (name, batch), x in self.pending.items():
            last = next(part.last for part in self.structure.parts if part.name == name)
            assert last is not None
            self.cached[name, batch] = self.block.get_submodule(last)(x)
        self.pending.clear()

    def finish(self) -> None:
        """Replace every state by the block's output."""
        for batch in range(len(self.states)):
            with self._parts(batch):
                output = self._run(batch)
            assert output is not None
            self._set_output(batch, output)

    def _set_output(self, batch: int, output: Tensor) -> None:
        self.states[batch] = output
        for part in self.structure.parts:
            self.cached.pop((part.name, batch), None)

    def _run(self, batch: int) -> Tensor | None:
        try:
            return self.model.run(self.index, self.states[batch], self.arguments, self.block)
        except StopForward:
            return None

    def _part_ended_by(self, path: str) -> Part | None:
        """The part whose output is this linear's output and final once this linear is; the linear
        must be alone in its group."""
        alone = [path] in self.structure.groups
        for part in self.structure.parts:
            if alone and part.last == path and part.needs <= self.final | {path}:
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
    def _parts(self, batch: int, stop_after: str | None = None) -> Iterator[None]:
        """Within this context parts return cached outputs, and outputs that are final are
        cached."""

        def cached_forward(part: Part, forward: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                key = part.name, batch
                if key in self.cached:
                    return part.output(self.cached[key].clone())  # the block may add to it in place
                output = forward(*args, **kwargs)
                if part.needs <= self.final:
                    tensor = output if isinstance(output, Tensor) else output[0]
                    self.cached[key] = tensor.clone()
                if part.name == stop_after:
                    raise StopForward
                return output

            return run

        modules = [self.block.get_submodule(part.name) for part in self.structure.parts]
        for part, module in zip(self.structure.parts, modules, strict=True):
            module.forward = cached_forward(part, module.forward)
        try:
            yield
        finally:
            for module in modules:
                del module.forward


@contextmanager
def observe_inputs(block: nn.Module, see: dict[str, Any]) -> Iterator[None]:
    """Within this context the callback of each linear named in `see` is called with its inputs."""
    handles = [
        block.get_submodule(path).register_forward_pre_hook(lambda m, args, s=show: s(args[0]))
        for path, show in see.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def rounded_input(
    block: nn.Module, paths: Sequence[str], rounding: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Within this context these linears, which share their input x, get `rounding(x)` for it."""
    last: tuple[Tensor, Tensor] | None = None

    def rounded(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal last
        if last is None or last[0] is not args[0]:
            last = args[0], rounding(args[0])
        return (last[1], *args[1:])

    handles = [block.get_submodule(path).register_forward_pre_hook(rounded) for path in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
