"""The model of a checkpoint without its weights, and the list of blocks in it."""

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from billfish.checkpoints.experts import COUNTS, SINGLE, Unfused
from billfish.checkpoints.match import (
    BUILDING,
    architecture,
    causal,
    model_config,
    parts_of_their_own,
    problems,
    refuse,
)
from billfish.checkpoints.packed import recognize
from billfish.checkpoints.read import Checkpoint
from billfish.errors import UserError
from billfish.models.experts import split_experts


class _EmptyOnMeta(TorchFunctionMode):
    """Puts torch.empty, which allocates every large parameter, on the meta device. Buffers such as
    rotary tables are computed as usual."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def skeleton(checkpoint: Checkpoint) -> Any:
    """The model that config.json describes, with parameters on the meta device; raises unless the
    checkpoint's tensors match it."""
    model_class, config = architecture(checkpoint), model_config(checkpoint)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{checkpoint.path}: encoder-decoder models are not supported.")
    if checkpoint.config.get("quantization_config") is not None:
        raise UserError(
            f"{checkpoint.path}: is quantized already ({recognize(checkpoint)[1]}). "
            "Start from the original, or use `billfish convert` to change its format."
        )
    if model_class.__name__.endswith("ForCausalLM"):
        causal(checkpoint, config)  # raises if the result could not be loaded
    shapes = {name: entry.shape for name, entry in checkpoint.entries.items()}
    found = problems(checkpoint, shapes, model_class=model_class, config=config)
    strangers = parts_of_their_own(checkpoint, found)
    refuse(checkpoint, [(name, told) for name, told in found if name not in strangers])
    with BUILDING, _EmptyOnMeta():
        model = model_class._from_config(config)
    experts = split_experts(model)
    known = any(SINGLE.fullmatch(name) for name in checkpoint)
    if known and isinstance(checkpoint, Unfused):
        known = all(model.get_submodule(name).layout == checkpoint.layout for name in experts)
    if experts and not known:
        raise UserError(
            f"{checkpoint.path}: holds all experts of a layer in one tensor ({experts[0]}). Of "
            f"model type {config.model_type!r} that layout is not known here."
        )
    return model


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """(name, ModuleList) of the blocks: the ModuleList with most parameters."""
    best: tuple[int, str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module):
            size = sum(parameter.numel() for parameter in module.parameters())
            if best is None or size > best[0]:
                best = (size, name, module)
    if best is None:
        raise UserError(f"{type(model).__name__} has no list of blocks; nothing to stream.")
    _, name, blocks = best
    reason = _unlike_linears(model, name, blocks)
    if reason:
        raise UserError(
            f"{type(model).__name__}: {reason}. Only plain linears can be quantized for now."
        )
    return name, blocks


def _unlike_linears(model: nn.Module, name: str, blocks: nn.ModuleList) -> str | None:
    """Why the blocks cannot be quantized, or None: they hold weights of three dimensions (fused
    experts) that are no convolution's, share weights, or hold no linears."""
    config = getattr(model, "config", None)
    owners: dict[int, str] = {}
    for path, module in blocks.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(recurse=False):
            where = f"{name}.{path}.{leaf}, {tuple(parameter.shape)}"
            block = path.partition(".")[0]
            if owners.setdefault(id(parameter), block) != block:
                return f"its blocks share weights ({where}), and each is quantized for itself"
            if parameter.ndim != 3 or isinstance(module, nn.Conv1d):
                continue
            if any(getattr(config, key, None) for key in COUNTS):
                return f"it is a mixture of experts in a layout that is not known here ({where})"
            return f"its blocks hold weights of three dimensions ({where})"
    if not any(isinstance(module, nn.Linear) for module in blocks.modules()):
        kinds = sorted({type(module).__name__ for module in blocks.modules()} & {"Conv1D"})
        but = " but Conv1D, GPT-2's, which store weights transposed" if kinds else ""
        return f"its blocks ({name}) hold no nn.Linear{but}"
    return None
