"""What follows the blocks of a streamed model: its final norm and its head.

The head (lm_head) turns hidden states into logits. Where it is tied to the embedding, no file holds
a tensor of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from billfish.models.blocks import StopForward, StreamedModel, as_output


@dataclass(frozen=True)
class Head:
    module: str  # its name in the model, and in a checkpoint that holds it packed
    weight: str  # tensor of the source that holds its weight: the embedding's, if tied
    n: int
    k: int
    tied: bool


def find_head(model: StreamedModel) -> Head | None:
    """None if the model has no head, or one that is no linear outside the blocks, or no weight for
    it."""
    head = model.model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return None
    named = model.model.named_modules()
    module: str | None = next((name for name, found in named if found is head), None)
    if module is None or module.startswith(model.prefix + "."):
        return None
    # A tied weight goes by the name of its first owner.
    name = next(name for name, found in model.model.named_parameters() if found is head.weight)
    if name not in model.stored:
        return None
    n, k = head.weight.shape
    return Head(module, model.stored[name], n, k, name != f"{module}.weight")


class Given(nn.Module):
    """Stands for all blocks: returns a state that is known."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.state


@contextmanager
def as_blocks(model: StreamedModel, blocks: list[Any]) -> Iterator[None]:
    """Within this context these are the model's blocks."""
    path, _, leaf = model.prefix.rpartition(".")
    parent = model.model.get_submodule(path)
    before = getattr(parent, leaf)
    setattr(parent, leaf, nn.ModuleList(blocks))
    try:
        yield
    finally:
        setattr(parent, leaf, before)


class HeadInputs:
    """Outputs of the last block -> inputs of the head. Within its context the parameters outside
    the blocks are loaded."""

    def __init__(self, model: StreamedModel, head: Head) -> None:
        self.model, self.head = model, model.model.get_submodule(head.module)

    def __enter__(self) -> "HeadInputs":
        self.model.fill("", skip=self.model.prefix + ".")
        self.width = self.model.output_width(torch.zeros(1, 1, dtype=torch.int64))
        return self

    def __exit__(self, *_: object) -> None:
        self.model.drop("", skip=self.model.prefix + ".")

    @torch.no_grad()
    def __call__(self, state: Tensor) -> Tensor:  # (batch, length, hidden), both
        seen: list[Tensor] = []

        def catch(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.append(args[0])
            raise StopForward

        handle = self.head.register_forward_pre_hook(catch)
        ids = torch.zeros(state.shape[:2], dtype=torch.int64)  # any: blocks give what they are told
        try:
            with as_blocks(self.model, [Given(as_output(state, self.width))]):
                self.model.forward(ids)
        finally:
            handle.remove()
        return seen[0]
