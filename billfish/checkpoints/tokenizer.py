"""The tokenizer of a checkpoint directory, and whether it belongs to its model."""

import string
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from billfish.checkpoints.config import read_json
from billfish.checkpoints.match import cause
from billfish.errors import UserError

MOST_TOKENS = 2**24  # today's largest vocabularies have 2**18
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


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
