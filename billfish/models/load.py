"""Loads a checkpoint directory, dense or packed, as a transformers model and tokenizer.

Everything that runs a model loads it here. The tensors in the files must match the modules of the
model one to one before a weight is read: no weight is left random, no tensor unread.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from billfish.checkpoints.dialects import dialects
from billfish.checkpoints.match import (
    BUILDING,
    architecture,
    cause,
    check_generation,
    differences,
    problems,
    refuse,
)
from billfish.checkpoints.packed import recognize, unpacked
from billfish.checkpoints.read import Checkpoint, stored_dtype
from billfish.checkpoints.tokenizer import load_tokenizer, refuse_foreign
from billfish.errors import UserError
from billfish.formats.spec import first_nonfinite
from billfish.models.compute import compute_dtype, device_of
from billfish.models.linear import QuantLinear

OWN = (
    "compressed-tensors",
    "gptq",
    "awq",
)  # refused if unreadable; other methods are left to transformers if it knows them


def load(
    path: Path | str,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    batch_invariant: bool = False,
    op: str = "auto",
) -> tuple[Any, Any]:
    """(model, tokenizer) of a dense or packed checkpoint directory.

    The model computes in `dtype`; auto: on a GPU the stored dtype, on a CPU what compute.py
    chooses.

    With `batch_invariant` a packed layer computes the same bits for a row in any batch; the rest of
    the model is PyTorch's, which does not promise this. `op` forces an op for the packed layers,
    for example "kleidiai".
    """
    where = device_of(device)
    model = load_model(path, compute_dtype(stored_dtype(path), where, dtype))
    tokenizer = load_tokenizer(path)
    refuse_foreign(tokenizer, rows_of(model), path)
    model.to(where)
    model.requires_grad_(False)
    if op != "auto" or batch_invariant:
        for module in model.modules():
            if isinstance(module, QuantLinear):
                module.arrange(op, batch_invariant)
    return model, tokenizer


def load_model(path: Path | str, dtype: torch.dtype) -> Any:
    """The model on the CPU, without a tokenizer. Never unpickles, runs remote code, uses the
    network or leaves a weight random."""
    checkpoint = check(path)
    try:
        with BUILDING:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except UserError as error:
        where = str(error)
        raise UserError(where if str(path) in where else f"{path}: {where}") from None
    except Exception as error:  # whatever check() did not foresee
        raise UserError(f"{path}: transformers cannot load it: {cause(error)}") from error
    model, info = loaded
    for name, parameter in model.named_parameters():
        problem = first_nonfinite(name, parameter)
        if problem:
            raise UserError(f"{path}: {problem}; such a model writes noise. Make it again.")
    if not any(isinstance(module, QuantLinear) for module in model.modules()):
        refuse(checkpoint, differences(info, type(model).__name__))
    return model


def check(path: Path | str) -> Checkpoint:
    """Open a checkpoint and raise unless its tensors match the model; reads headers only."""
    checkpoint = Checkpoint(path)
    check_generation(checkpoint.path)
    if checkpoint.config.get("architectures"):
        architecture(checkpoint)
    dialect, method, unsupported = recognize(checkpoint)
    if checkpoint.config.get("quantization_config") is None:
        dialect = unsupported = None  # transformers ignores quantize_config.json
    if unsupported is None:
        refuse(checkpoint, problems(checkpoint, *unpacked(checkpoint, dialect)))
    elif method in dialects() or method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise UserError(f"{checkpoint.path / 'config.json'}: {unsupported}")
    return checkpoint


def rows_of(model: Any) -> int:
    return len(model.get_input_embeddings().weight)
