"""StreamedModel: any Hugging Face model whose blocks are loaded and freed one at a time.

Buffers are real, parameters are on the meta device; `fill` reads the weights of one block, `drop`
frees them. Inputs of blocks are caught by module hooks instead of tracing, so any model works whose
decoder (or encoder) is a list of blocks. Quantization is not known here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from billfish.checkpoints.experts import unfused
from billfish.checkpoints.read import Checkpoint
from billfish.errors import UserError
from billfish.formats.spec import first_nonfinite
from billfish.models.experts import Experts, Lend, idle_experts
from billfish.models.names import names_in_files
from billfish.models.skeleton import find_blocks, skeleton

Shape = tuple[int, ...]  # (batch, length)
Read = Callable[[str, torch.device], Tensor]  # name of a tensor in the checkpoint -> its value


@dataclass(frozen=True)
class LinearName:
    """One linear of a block: its `path` in the block, and the name of its `weight` in the
    checkpoint."""

    path: str
    weight: str
    n: int
    k: int


class StopForward(Exception):
    """Raised by a hook to end a forward pass once it has recorded what it needs."""


class StreamedModel:
    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint, self.dtype, self.device = unfused(checkpoint), dtype, device
        self.model = skeleton(self.checkpoint)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self.prefix, self.blocks = find_blocks(self.model)
        self._named = names_in_files(self.model, self.checkpoint)
        self.stored = self._stored_names()
        names: dict[int, list[str]] = {}  # of a parameter: a head may be tied to the embeddings
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self._aliases = {alias: tied for tied in names.values() for alias in tied}
        modules = self.model.named_modules()
        self._experts = {name: found for name, found in modules if isinstance(found, Experts)}
        self._lent: set[str] = set()  # weights of experts: read when one runs
        for name, module in self._experts.items():
            module.lend = self._lender(name, self.read)
            inside = (f"{name}.{path}" for path, _ in module.named_parameters())
            self._lent.update(path for path in inside if path.endswith(".weight"))

    def _lender(self, experts: str, read: Read) -> Lend:
        # A plain function: a bound method would be copied, with the model, wherever a block is.
        def lend(expert: int, names: Sequence[str]) -> dict[str, Tensor]:
            return {name: self._value(f"{experts}.{expert}.{name}", read) for name in names}

        return lend

    def _stored_names(self) -> dict[str, str]:
        """Name of a parameter in the model -> its name in the checkpoint."""
        stored = {}
        for name, _ in self.model.named_parameters():
            if name in self._named:
                stored[name] = self._named[name]
            elif name.startswith(self.prefix + "."):
                raise UserError(
                    f"{self.checkpoint.path}: has no tensor {name!r}, which "
                    f"{type(self.model).__name__} needs: transformers makes it of others when it "
                    "loads the model, in a way that is not known here."
                )
        return stored

    def strangers(self) -> list[str]:
        """Tensors of the checkpoint that are no part of the model, neither a parameter (tied ones
        have several names) nor a buffer."""
        own = {*self._named.values()}
        return [name for name in self.checkpoint if name not in own]

    @property
    def unfilled(self) -> list[str]:
        """Parameters outside the blocks that the checkpoint has under no name known here."""
        return [
            name
            for name, tied in self._aliases.items()
            if not any(alias in self.stored for alias in tied)
        ]

    def block_prefix(self, index: int) -> str:
        return f"{self.prefix}.{index}."

    def linears(self, index: int) -> list[LinearName]:
        found = []
        for path, module in self.blocks[index].named_modules():
            if isinstance(module, nn.Linear):
                name = self.stored[f"{self.block_prefix(index)}{path}.weight"]
                found.append(LinearName(path, name, module.out_features, module.in_features))
        return found

    def stored_block(self, index: int) -> list[str]:
        """Names of all tensors of block `index` in the checkpoint, also those that are no
        parameters."""
        names = [
            stored
            for name, stored in self.stored.items()
            if name.startswith(self.block_prefix(index))
        ]
        prefix = names[0][: names[0].index(f".{index}.") + len(f".{index}.")]
        return [name for name in self.checkpoint if name.startswith(prefix)]

    def read(self, stored: str, device: torch.device | str = "cpu") -> Tensor:
        """One tensor of the checkpoint in its stored dtype; raises if it holds NaN or Inf."""
        tensor = self.checkpoint.tensor(stored).to(device)
        problem = first_nonfinite(stored, tensor)
        if problem:
            file = self.checkpoint.entries[stored].file
            raise UserError(
                f"{self.checkpoint.path / file}: {problem}; such weights cannot be quantized."
            )
        return tensor

    def fill(self, prefix: str, skip: str = "\0", read: Read | None = None) -> None:
        """Load the parameters whose names start with `prefix`, except those that start with `skip`;
        from the checkpoint, unless `read` gives other values for them. Weights of experts are read
        from there whenever one runs."""
        read = read or self.read

        def chosen(name: str) -> bool:
            return name.startswith(prefix) and not name.startswith(skip)

        for name in self.stored:
            if chosen(name) and name not in self._lent:
                self._set(name, self._value(name, read))
        for name, experts in self._experts.items():
            if chosen(name):
                experts.lend = self._lender(name, read)

    def _value(self, name: str, read: Read) -> Tensor:
        """A parameter as the model computes with it."""
        value = read(self.stored[name], self.device)
        return value.to(self.dtype) if value.is_floating_point() else value

    def drop(self, prefix: str, skip: str = "\0") -> None:
        for name in self.stored:
            if name.startswith(prefix) and not name.startswith(skip):
                self._set(name, self.model.get_parameter(name).to("meta"))

    def _set(self, name: str, value: Tensor) -> None:
        parameter = nn.Parameter(value, requires_grad=False)
        for alias in self._aliases[name]:
            path, _, leaf = alias.rpartition(".")
            self.model.get_submodule(path)._parameters[leaf] = parameter

    @torch.no_grad()
    def first_inputs(
        self, batches: list[Tensor], read: Read | None = None
    ) -> tuple[list[Tensor], "Arguments"]:
        """Inputs of block 0, (batch, length, hidden) each, and the other arguments of all blocks:
        for each (batch, length) of the batches, and for the first sequence alone.

        Parameters outside the blocks (embeddings, norms) are loaded, as `fill` does, for this pass
        only.
        """
        blocks = self.prefix + "."
        self.fill("", skip=blocks, read=read)
        self.model.eval()
        hidden: list[Tensor] = []

        def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden.append(args[0] if args else kwargs["hidden_states"])
            raise StopForward

        handle = self.blocks[0].register_forward_pre_hook(catch, with_kwargs=True)
        for ids in batches:
            self.forward(ids)
        handle.remove()
        alone = batches[0][:1]
        arguments = self._arguments({tuple(ids.shape): ids for ids in (*batches, alone)})
        self.drop("", skip=blocks)
        return [state.to(self.dtype) for state in hidden], arguments

    def forward(self, ids: Tensor) -> Any:
        """A forward pass; None if a hook ends it by StopForward."""
        extra = {} if self.is_encoder else {"use_cache": False}
        with suppress(StopForward):
            return self.model(input_ids=ids.to(self.device), **extra)

    @torch.no_grad()
    def logits(self, ids: Tensor, states: Tensor, width: int) -> Tensor:
        """What the head makes of `states`, the outputs of the last block for `ids`. Parameters
        outside the blocks must be filled; `width`: see output_width."""
        given = as_output(states, width)
        with self._forwards([lambda *args, **kwargs: given] * len(self.blocks)):
            found: Tensor = self.forward(ids).logits
        return found

    @property
    def is_encoder(self) -> bool:
        return (
            not getattr(self.model.config, "is_decoder", False)
            and self.model.can_generate() is False
        )

    def _arguments(self, by_shape: dict[tuple[int, ...], Tensor]) -> "Arguments":
        """The arguments of each block besides the hidden state, for each shape of ids.

        One pass per shape, in which blocks return their input unchanged, records the arguments of
        every block (masks and rotary tables may differ between blocks).
        """
        width = self.output_width(min(by_shape.values(), key=Tensor.numel))
        arguments = Arguments(len(self.blocks), partial(self._record_shape, width))
        for ids in by_shape.values():
            self._record(arguments, ids, width)
        return arguments

    @torch.no_grad()
    def output_width(self, ids: Tensor) -> int:
        """How many items blocks return as a tuple, 0 for a tensor: block 0 runs once to tell.
        Parameters outside the blocks must be filled."""
        self.fill(self.block_prefix(0))
        found: list[int] = []

        def learn(module: nn.Module, args: Any, output: Any) -> None:
            found.append(len(output) if isinstance(output, tuple) else 0)
            raise StopForward

        handle = self.blocks[0].register_forward_hook(learn)
        with idle_experts(self.blocks[0]):
            self.forward(ids)
        handle.remove()
        self.drop(self.block_prefix(0))
        return found[0]

    @torch.no_grad()
    def _record_shape(self, width: int, arguments: "Arguments", shape: Shape) -> None:
        """Record the arguments for a (batch, length) that first_inputs did not see."""
        blocks = self.prefix + "."
        self.fill("", skip=blocks)
        with torch.autocast(self.device.type, enabled=False):
            self._record(arguments, torch.zeros(shape, dtype=torch.int64), width)
        self.drop("", skip=blocks)

    def _record(self, arguments: "Arguments", ids: Tensor, width: int) -> None:
        shape = tuple(ids.shape)
        made = [self._recorder(arguments, i, shape, width) for i in range(len(self.blocks))]
        with self._forwards(made):
            self.forward(ids)

    @contextmanager
    def _forwards(self, made: list[Callable[..., Any]]) -> Iterator[None]:
        """Within this context these functions stand for the blocks' forward."""
        originals = [block.forward for block in self.blocks]
        try:
            for block, forward in zip(self.blocks, made, strict=True):
                block.forward = forward
            yield
        finally:
            for block, original in zip(self.blocks, originals, strict=True):
                del block.forward
                assert block.forward == original

    def _recorder(self, arguments: "Arguments", index: int, shape: Shape, width: int) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs.pop("hidden_states")
            kwargs = {
                key: value
                for key, value in kwargs.items()
                if key not in ("past_key_values", "past_key_value", "layer_past")
            }
            arguments.put(index, shape, args[1:], kwargs)
            if index == len(self.blocks) - 1:
                raise StopForward
            return as_output(hidden, width)

        return record

    def run(
        self,
        index: int,
        hidden: Tensor,
        arguments: "Arguments",
        block: Callable[..., Any] | None = None,
    ) -> Tensor:
        """Output of block `index`, or of `block` called with its arguments, for hidden states."""
        args, kwargs = arguments.get(index, tuple(hidden.shape[:2]), hidden.dtype)
        output = (block or self.blocks[index])(hidden, *args, **kwargs)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result


def as_output(state: Tensor, width: int) -> Any:
    """A hidden state as a block returns it: alone, or first of a tuple of so many items."""
    return (state, *[None] * (width - 1)) if width else state


class Arguments:
    """Arguments of each block besides the hidden state, by (batch, length). Tensors that blocks
    share are stored once; `record(self, shape)` adds those of a shape that is missing."""

    def __init__(self, blocks: int, record: "Callable[[Arguments, Shape], None]") -> None:
        self._calls: list[dict[Shape, tuple[tuple[Any, ...], dict[str, Any]]]] = [
            {} for _ in range(blocks)
        ]
        self._record = record

    def put(self, index: int, shape: Shape, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls[index][shape] = (args, kwargs)

    def get(
        self, index: int, shape: Shape, dtype: torch.dtype
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if shape not in self._calls[index]:
            self._record(self, shape)
        args, kwargs = self._calls[index][shape]
        return _as_dtype(args, dtype), _as_dtype(kwargs, dtype)


def _as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Casts float tensors, also inside tuples and dicts: masks and rotary tables must have the
    hidden state's dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_as_dtype(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _as_dtype(item, dtype) for key, item in value.items()}
    return value
