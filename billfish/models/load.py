"""A checkpoint directory, dense or packed, as a model and a tokenizer of transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from billfish.models.hf import read_config
from billfish.models.linear import QuantLinear


def load(
    path: Path | str,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    batch_invariant: bool = False,
) -> tuple[Any, Any]:
    """(model, tokenizer) of a dense or packed checkpoint directory.

    With `batch_invariant` packed layers give a row the same bits whatever batch it is in; the rest
    of the model is PyTorch's and promises nothing of the kind.
    """
    config = read_config(Path(path))
    if dtype == "auto":
        stored = config.get("dtype") or config.get("torch_dtype")
        # fp16 has no fast path on a CPU; bf16 has, and the packed codes are the same.
        packed_half = stored == "float16" and device == "cpu" and "quantization_config" in config
        dtype = torch.bfloat16 if packed_half else "auto"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    model.to(device)  # type: ignore[arg-type]
    model.requires_grad_(False)
    if batch_invariant:
        for module in model.modules():
            if isinstance(module, QuantLinear):
                module.arrange("invariant")
    return model, tokenizer
