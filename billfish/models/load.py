"""A checkpoint directory, dense or packed, as a model and a tokenizer of transformers.

Everything that runs a model comes through here. The tensors of the files and the modules of the
model must match one to one before a weight is read: nothing is random, nothing is left unread.
"""

import string
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from billfish.compute import compute_dtype, device_of
from billfish.errors import UserError
from billfish.formats.spec import first_nonfinite
from billfish.models.config import read_json
from billfish.models.hf import Checkpoint, stored_dtype
from billfish.models.linear import QuantLinear
from billfish.models.match import (
    architecture,
    cause,
    check_generation,
    differences,
    problems,
    refuse,
)
from billfish.models.packed import recognize, unpacked

OWN = ("compressed-tensors", "gptq", "awq")  # of the others transformers may know some
MOST_TOKENS = 2**24  # today's largest vocabularies have 2**18
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


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
    model = load_model(path, compute_dtype(stored_dtype(path), where, dtype))
    tokenizer = load_tokenizer(path)
    refuse_foreign(tokenizer, rows_of(model), path)
    model.to(where)
    model.requires_grad_(False)
    if op != "auto":
        for module in model.modules():
            if isinstance(module, QuantLinear):
                module.arrange(op)
    return model, tokenizer


def load_model(path: Path | str, dtype: torch.dtype) -> Any:
    """The model alone, on the CPU. No pickle, no remote code, no network, no random weight."""
    checkpoint = check(path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=False, use_safetensors=True,
            local_files_only=True, output_loading_info=True,
        )  # fmt: skip
    except UserError as error:
        where = str(error)
        raise UserError(where if str(path) in where else f"{path}: {where}") from None
    except Exception as error:  # the last resort: what the checks before it did not foresee
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
    """A checkpoint whose tensors and modules match; from headers alone."""
    checkpoint = Checkpoint(path)
    check_generation(checkpoint.path)
    if checkpoint.config.get("architectures"):
        architecture(checkpoint)
    dialect, method, unsupported = recognize(checkpoint)
    if checkpoint.config.get("quantization_config") is None:
        dialect = unsupported = None  # transformers does not look into quantize_config.json
    if unsupported is None:
        refuse(checkpoint, problems(checkpoint, *unpacked(checkpoint, dialect)))
    elif method in OWN or method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise UserError(f"{checkpoint.path / 'config.json'}: {unsupported}")
    return checkpoint


def load_tokenizer(path: Path | str) -> Any:
    """The tokenizer of a checkpoint directory; a sentence for whatever may be wrong with it."""
    check_ids(Path(path) / TOKENIZERS[0])
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
        tokenizer(string.printable)
        return tokenizer
    except BaseException as error:
        # Rust panics in the tokenizers library are no Exception.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        there = [name for name in TOKENIZERS if (Path(path) / name).exists()]
        what = f"{', '.join(there)} cannot be used" if there else f"no {' or '.join(TOKENIZERS)}"
        raise UserError(
            f"{path}: no tokenizer can be loaded from it: {what} ({cause(error)}). Copy the "
            "tokenizer's files again from the original model."
        ) from error


def check_ids(file: Path) -> None:
    """The tokenizers library counts up to the largest id, and ends the process once memory does."""
    if not file.exists():
        return
    content = read_json(file)
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            ids[str(token.get("content"))] = token.get("id")
    for token, number in ids.items():
        if not isinstance(number, int) or not 0 <= number < MOST_TOKENS:
            raise UserError(
                f"{file}: {token!r} has the id {number!r}; ids are whole numbers below "
                f"{MOST_TOKENS}. Copy it again from the original model."
            )


def refuse_foreign(tokenizer: Any, rows: int, path: Path | str) -> None:
    """Raises for a tokenizer of another model, given the rows of the embedding. Tokens that were
    added and never trained may be beyond it; those of plain text may not."""
    last = max(tokenizer(string.printable).input_ids, default=0)
    if last >= rows:
        raise UserError(
            f"{path}: its tokenizer gives token {last}, and the model has {rows}. They do not "
            "belong together."
        )


def rows_of(model: Any) -> int:
    return len(model.get_input_embeddings().weight)
