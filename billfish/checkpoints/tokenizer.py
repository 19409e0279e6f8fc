"""Loads the tokenizer of a checkpoint directory and checks that it belongs to the model."""

import string
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from billfish.checkpoints.config import read_json
from billfish.checkpoints.match import cause
from billfish.errors import UserError

MOST_TOKENS = 2**24  # the largest known vocabularies have 2**18
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def load_tokenizer(path: Path | str) -> Any:
    """The tokenizer of a checkpoint directory; raises a UserError for any failure."""
    check_ids(Path(path) / TOKENIZERS[0])
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
        # Without files transformers makes an empty one for some families (Qwen2, for example).
        if not tokenizer(string.printable, add_special_tokens=False).input_ids:
            raise ValueError("it gives no tokens for plain text")
        return tokenizer
    except BaseException as error:
        # Panics of the tokenizers library (Rust) are not subclasses of Exception.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        there = [name for name in TOKENIZERS if (Path(path) / name).exists()]
        what = f"{', '.join(there)} cannot be used" if there else f"no {' or '.join(TOKENIZERS)}"
        raise UserError(
            f"{path}: no tokenizer can be loaded from it: {what} ({cause(error)}). Copy the "
            "tokenizer's files again from the original model."
        ) from error


def check_ids(file: Path) -> None:
    """Raise for ids that are too large: the tokenizers library allocates up to the largest id, and
    aborts the process when memory runs out."""
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
    """Raise if plain text gives tokens beyond the `rows` of the embedding: then the tokenizer
    belongs to another model. Added tokens that were never trained may lie beyond."""
    last = max(tokenizer(string.printable).input_ids, default=0)
    if last >= rows:
        raise UserError(
            f"{path}: its tokenizer gives token {last}, and the model has {rows}. They do not "
            "belong together."
        )
