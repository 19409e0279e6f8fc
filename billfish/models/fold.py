"""Finds the layer of a block into which scales of some linears' input channels can be folded (AWQ),
and whether its output channels may be permuted.

There is no table of architectures; candidates are tried. Scaling a layer's outputs down and the
linears' columns up by powers of two must leave the block's output unchanged. This finds norm ->
q/k/v and gate/up, v -> o (one scale for the heads of a group) and up -> down, and rejects layers
before a nonlinearity. Outputs of up and gate may be permuted together, those of v within a head,
those of a norm never, because its input is the residual stream.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from billfish.models.blocks import Arguments, StreamedModel

TOLERANCE = 1e-3  # relative to what the block adds; a wrong fold changes that by more than 0.1


@dataclass(frozen=True)
class FoldSource:
    path: str
    rows: int  # its output channels
    row_of_column: Tensor  # (k,) int64: the output that feeds each input channel of the linears


@torch.no_grad()
def fold_source(
    model: StreamedModel, index: int, group: list[str], probe: Tensor, arguments: Arguments
) -> FoldSource | None:
    """The layer into which scales of the linears `group`, which share an input, can be folded; None
    if there is none."""
    block = copy.deepcopy(model.blocks[index]).float()
    first = block.get_submodule(group[0])
    assert isinstance(first, nn.Linear)
    probe = probe.float()
    expected = model.run(index, probe, arguments, block)
    added = (expected - probe).norm().clamp(max=expected.norm())
    for path, module in reversed(list(block.named_modules())):
        rows = _output_channels(module)
        if rows is None or path in group or first.in_features % rows:
            continue
        source = FoldSource(path, rows, _row_of_column(model, rows, first.in_features))
        generator = torch.Generator().manual_seed(0)
        factor = (2.0 ** torch.randint(-2, 3, (rows,), generator=generator)).to(model.device)
        trial = copy.deepcopy(block)
        for parameter in trial.get_submodule(path).parameters():
            parameter.data /= factor.view(-1, *[1] * (parameter.ndim - 1))
        for consumer in group:
            trial.get_submodule(consumer).get_parameter("weight").data *= factor[
                source.row_of_column
            ]
        if (model.run(index, probe, arguments, trial) - expected).norm() <= TOLERANCE * added:
            return source
    return None


@dataclass(frozen=True)
class Reordering:
    """Outputs of the linears `paths` may be permuted within every run of `span`, together with the
    columns of the linears that read them: for schemes that group similar channels."""

    source: FoldSource
    paths: tuple[str, ...]
    span: int

    def apply(self, block: nn.Module, group: list[str], order: Tensor) -> None:  # (rows,) int64
        """Output i of `paths` becomes the former output order[i]; columns of `group` follow."""
        for path in self.paths:
            for parameter in block.get_submodule(path).parameters():
                parameter.data = parameter.data[order]
        row = self.source.row_of_column
        columns = torch.arange(len(row), device=row.device) + order[row] - row
        for path in group:
            weight = block.get_submodule(path).get_parameter("weight")
            weight.data = weight.data[:, columns]


@torch.no_grad()
def find_reordering(
    model: StreamedModel,
    index: int,
    source: FoldSource,
    group: list[str],
    siblings: list[str],  # linears that share the source's input
    probe: Tensor,
    arguments: Arguments,
) -> Reordering | None:
    block = copy.deepcopy(model.blocks[index]).float()
    if not isinstance(block.get_submodule(source.path), nn.Linear):
        return None
    probe = probe.float()
    expected = model.run(index, probe, arguments, block)
    added = (expected - probe).norm().clamp(max=expected.norm())
    twins = tuple(
        path
        for path in siblings
        if path != source.path and _output_channels(block.get_submodule(path)) == source.rows
    )
    generator = torch.Generator().manual_seed(0)
    for span in dict.fromkeys((source.rows, _head(model))):
        if source.rows % span:
            continue
        starts = torch.arange(0, source.rows, span)
        order = torch.cat([start + torch.randperm(span, generator=generator) for start in starts])
        for paths in ((source.path,), (source.path, *twins)):
            trial, found = copy.deepcopy(block), Reordering(source, paths, span)
            found.apply(trial, group, order.to(model.device))
            if (model.run(index, probe, arguments, trial) - expected).norm() <= TOLERANCE * added:
                return found
    return None


def _output_channels(module: nn.Module) -> int | None:
    """Output channels of a layer that can absorb a scale: a linear, or a norm with a weight for
    each channel; None for others, and for experts, which are not in memory."""
    if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        return None
    if isinstance(module, nn.Linear):
        return module.out_features
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.ndim == 1 and not list(module.children()):
        return len(weight)
    return None


def _row_of_column(model: StreamedModel, rows: int, k: int) -> Tensor:
    """The output of the source that feeds each column: one to one, or for grouped-query attention
    one for several heads."""
    columns = torch.arange(k, device=model.device)
    if rows == k:
        return columns
    head = _head(model)
    row: Tensor = columns // (head * (k // rows)) * head + columns % head
    return row % rows


def _head(model: StreamedModel) -> int:
    config = model.model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(size)
