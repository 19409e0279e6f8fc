"""Calibration text -> token sequences, from a local .txt, .jsonl or .parquet file, a hub data set,
or the sample that the package ships.

Documents longer than `seqlen` are split into windows; shorter ones keep their length (MARLIN 3.5
(b): sequences of different lengths in one run). The seed alone decides which windows are used.
"""

import hashlib
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from billfish.errors import UserError

SAMPLE = "sample"  # name of the shipped text
MIN_TOKENS = 16  # shorter documents tell nothing about attention
MIN_TOTAL = 256


@dataclass(frozen=True)
class Calibration:
    sequences: list[Tensor]  # int64, 1-D, lengths may differ
    source: str
    sha256: str  # of the text

    @property
    def tokens(self) -> int:
        return sum(len(sequence) for sequence in self.sequences)

    def batches(self, tokens: int) -> list[Tensor]:
        """(batch, length) token ids; a batch holds sequences of one length, `tokens` tokens at most
        or one sequence."""
        by_length: dict[int, list[Tensor]] = {}
        for sequence in self.sequences:
            by_length.setdefault(len(sequence), []).append(sequence)
        return [
            batch
            for length, alike in by_length.items()
            for batch in torch.split(torch.stack(alike), max(1, tokens // length))
        ]


def calibration(source: str, tokenizer: Any, nsamples: int, seqlen: int, seed: int) -> Calibration:
    if nsamples < 1 or seqlen < MIN_TOKENS:
        raise UserError(
            f"--nsamples {nsamples} --seqlen {seqlen}: at least 1 sample of {MIN_TOKENS} tokens."
        )
    documents = read_documents(source)
    windows: list[Tensor] = []
    for document in documents:
        ids = torch.tensor(tokenizer(document, verbose=False)["input_ids"], dtype=torch.int64)
        windows += [window for window in torch.split(ids, seqlen) if len(window) >= MIN_TOKENS]
        if len(windows) >= 16 * nsamples:  # enough to choose from; a data set may be endless
            break
    total = sum(len(window) for window in windows)
    if total < MIN_TOTAL:
        raise UserError(
            f"{source}: only {total} calibration tokens in pieces of {MIN_TOKENS} or more; "
            f"at least {MIN_TOTAL} are needed, 100000 give good results."
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(windows), generator=generator)[:nsamples].sort().values
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    return Calibration([windows[i] for i in chosen.tolist()], source, digest)


def read_documents(source: str) -> list[str]:
    if source == SAMPLE:
        file = resources.files("billfish").joinpath("data/sample_calibration.txt")
        return [file.read_text(encoding="utf8")]
    path = Path(source).expanduser()
    if not path.exists():
        if path.suffix in (".txt", ".jsonl", ".parquet", ".json") or source.startswith((".", "/")):
            raise UserError(f"{path}: no such calibration file.")
        return _hub_documents(source)
    if path.is_dir():
        raise UserError(f"{path}: is a directory; give one .txt, .jsonl or .parquet file.")
    if path.suffix == ".jsonl":
        documents = []
        # Not splitlines(): it also splits at U+2028 and others, which JSON strings may contain.
        for number, line in enumerate(_read_text(path).split("\n"), 1):
            if line.strip():
                documents.append(_text_of(line, path, number))
    elif path.suffix == ".parquet":
        documents = _parquet_documents(path)
    elif path.suffix in (".txt", ".raw", ".md"):
        documents = [_read_text(path)]
    else:
        raise UserError(f"{path}: calibration data must be .txt, .jsonl or .parquet.")
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise UserError(f"{path}: is empty; calibration needs text.")
    return documents


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error}).") from None


def _text_of(line: str, path: Path, number: int) -> str:
    try:
        text = json.loads(line)["text"]
        text.encode()  # fails unless it is a string without lone surrogates
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f'{path}, line {number}: expected a JSON object whose "text" is a string.'
        ) from None
    return str(text)


def _parquet_documents(path: Path) -> list[str]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path}: parquet needs pyarrow: pip install 'billfish[eval]'.") from None
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise UserError(f"{path}: damaged or no parquet file ({error}).") from None
    if "text" not in table.column_names:
        raise UserError(f"{path}: has columns {table.column_names}; one named 'text' is needed.")
    return [str(value) for value in table.column("text").to_pylist() if value]


def _hub_documents(name: str, limit: int = 4096) -> list[str]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            f"{name}: no such file; to read it as a hub data set: pip install 'billfish[eval]'."
        ) from None
    try:
        rows = load_dataset(name, split="train", streaming=True)
        texts = [row["text"] for row, _ in zip(rows, range(limit), strict=False)]
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(
            f"{name}: neither a file here nor a hub data set in reach with a 'text' column "
            f"({type(error).__name__})."
        ) from None
    return [str(text) for text in texts if text]
