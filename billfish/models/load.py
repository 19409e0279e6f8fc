"""A checkpoint directory, dense or packed, as a model and a tokenizer of transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from billfish.compute import compute_dtype, device_of
from billfish.errors import UserError
from billfish.models.hf import stored_dtype
from billfish.models.linear import QuantLinear


def load(
    path: Path | str,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    batch_invariant: bool = False,
    op: str = "auto",
) -> tuple[Any, Any]:
    """(model, tokenizer) of a dense or packed checkpoint directory.

    It computes in `dtype`; auto: on a GPU what is stored, on a CPU what compute.py chooses.

    With `batch_invariant` packed layers give a row the same bits whatever batch it is in; the rest
    of the model is PyTorch's and promises nothing of the kind. That is their op "invariant"; `op`
    names any other, such as "kleidiai".
    """
    if batch_invariant:
        if op not in ("auto", "invariant"):
            raise UserError(f"op {op!r} is not batch invariant: ask for one of the two.")
        op = "invariant"
    where = device_of(device)
    dtype = compute_dtype(stored_dtype(path), where, dtype)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    model.to(where)  # type: ignore[arg-type]
    model.requires_grad_(False)
    if op != "auto":
        for module in model.modules():
            if isinstance(module, QuantLinear):
                module.arrange(op)
    return model, tokenizer
