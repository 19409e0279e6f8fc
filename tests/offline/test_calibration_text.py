"""Calibration text from every source, the choice of windows, and every error with its advice."""

import hashlib
import json
import sys
import time

import pytest
import torch

from billfish.errors import UserError
from billfish.offline.text import MIN_TOKENS, calibration, read_documents


class Words:
    """A tokenizer of one word a token, called as those of transformers are."""

    def __init__(self):
        self.ids = {}
        self.documents = 0

    def __call__(self, text, verbose):
        assert verbose is False  # a long text is no warning here
        self.documents += 1
        return {"input_ids": [self.ids.setdefault(word, len(self.ids)) for word in text.split()]}


def text(count, word="w"):
    return " ".join(f"{word}{i}" for i in range(count))


def write(path, content):
    path.write_text(content, encoding="utf8")
    return str(path)


def jsonl(path, rows):
    return write(path, "\n".join(json.dumps(row) for row in rows) + "\n")


def parquet(path, columns):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


DOCUMENTS = [text(30, "a"), text(200, "b"), text(100, "c"), text(MIN_TOKENS - 1, "d")]


# --- sources -------------------------------------------------------------------------------------


def test_txt_is_one_document(tmp_path):
    content = "One line.\n\nÄnother, with\u2028 odd ends.\n"
    for suffix in ("txt", "raw", "md"):
        assert read_documents(write(tmp_path / f"x.{suffix}", content)) == [content]


def test_jsonl_is_a_document_a_line(tmp_path):
    rows = [{"text": "first", "id": 1}, {"text": "second\nline"}, {"text": " "}, {"text": "é"}]
    path = jsonl(tmp_path / "x.jsonl", rows)
    assert read_documents(path) == ["first", "second\nline", "é"]
    write(tmp_path / "y.jsonl", '\r\n{"text": "first"}\r\n\r\n{"text": "second"}')
    assert read_documents(str(tmp_path / "y.jsonl")) == ["first", "second"]


@pytest.mark.parametrize("odd", ["\u2028", "\u2029", "\x85", "\x7f"])
def test_jsonl_lines_end_at_newlines_only(tmp_path, odd):
    """JSON allows all of these inside a string; str.splitlines() would cut at three of them."""
    row = json.dumps({"text": f"one{odd}text"}, ensure_ascii=False)
    assert read_documents(write(tmp_path / "x.jsonl", row)) == [f"one{odd}text"]


def test_parquet_column(tmp_path):
    path = parquet(tmp_path / "x.parquet", {"id": [1, 2, 3, 4], "text": ["one", None, "", "two"]})
    assert read_documents(path) == ["one", "two"]


def test_the_sample_ships_and_suffices():
    (document,) = read_documents("sample")
    assert len(document) > 100_000
    found = calibration("sample", Words(), 128, 256, 0)
    assert len(found.sequences) == 128 and 127 * 256 < found.tokens <= 128 * 256
    assert found.source == "sample"
    assert found.sha256 == hashlib.sha256(document.encode()).hexdigest()


def test_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "mine.txt", "at home")
    assert read_documents("~/mine.txt") == ["at home"]


# --- windows -------------------------------------------------------------------------------------


def test_documents_keep_their_lengths(tmp_path):
    """Up to seqlen; longer ones are cut, and what is too short to say anything is dropped."""
    path = jsonl(tmp_path / "x.jsonl", [{"text": document} for document in DOCUMENTS])
    tokenizer = Words()
    found = calibration(path, tokenizer, 99, 128, 0)
    assert [len(sequence) for sequence in found.sequences] == [30, 128, 72, 100]
    back = {number: word for word, number in tokenizer.ids.items()}
    texts = [" ".join(back[i] for i in sequence.tolist()) for sequence in found.sequences]
    assert texts[0] == DOCUMENTS[0] and f"{texts[1]} {texts[2]}" == DOCUMENTS[1]
    assert all(sequence.dtype == torch.int64 and sequence.ndim == 1 for sequence in found.sequences)
    assert found.tokens == 330
    assert found.sha256 == hashlib.sha256("\0".join(DOCUMENTS).encode()).hexdigest()


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_kinds_of_files_give_the_same_tokens(tmp_path, kind):
    long, path = text(400), tmp_path / f"x.{kind}"
    make = {
        "txt": lambda: write(path, long),
        "jsonl": lambda: jsonl(path, [{"text": long}]),
        "parquet": lambda: parquet(path, {"text": [long]}),
    }
    found = calibration(make[kind](), Words(), 3, 50, 1)
    expected = calibration(write(tmp_path / "same.txt", long), Words(), 3, 50, 1)
    assert found.sha256 == expected.sha256
    for ours, theirs in zip(found.sequences, expected.sequences, strict=True):
        assert torch.equal(ours, theirs)


def test_the_seed_decides_and_nothing_else(tmp_path):
    path = write(tmp_path / "x.txt", text(2000))

    def starts(seed):
        torch.manual_seed(torch.initial_seed() + 1)  # the global state has no say
        return [int(s[0]) for s in calibration(path, Words(), 10, 32, seed).sequences]

    assert starts(0) == starts(0) == sorted(starts(0))
    assert len(set(starts(0))) == 10
    assert len({tuple(starts(seed)) for seed in range(5)}) == 5
    state = torch.get_rng_state()
    calibration(path, Words(), 10, 32, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_endless_data_set_is_not_read_to_its_end(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"text": text(64)}] * 100)
    tokenizer = Words()
    assert len(calibration(path, tokenizer, 2, 64, 0).sequences) == 2
    assert tokenizer.documents == 32  # 16 to choose each from
    assert len(calibration(path, Words(), 1000, 64, 0).sequences) == 100  # fewer than asked for


# --- errors --------------------------------------------------------------------------------------


def refused(source, **changes):
    values = {"nsamples": 4, "seqlen": 64, "seed": 0} | changes
    with pytest.raises(UserError) as error:
        calibration(str(source), Words(), **values)
    return str(error.value)


@pytest.mark.parametrize("name", ["gone.txt", "gone.jsonl", "gone.parquet", "gone.json", "./gone"])
def test_missing_files_are_not_looked_for_on_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)  # asking for it would be another error
    assert "no such calibration file" in refused(name)
    assert "no such calibration file" in refused(tmp_path / "nothing")


@pytest.mark.parametrize("content", ["", " \n\t\n "])
def test_empty(tmp_path, content):
    path = write(tmp_path / "x.txt", content)
    assert refused(path) == f"{path}: is empty; calibration needs text."
    assert "is empty" in refused(write(tmp_path / "x.jsonl", content))
    assert "is empty" in refused(jsonl(tmp_path / "y.jsonl", [{"text": content}]))
    assert "is empty" in refused(parquet(tmp_path / "x.parquet", {"text": [content, None]}))


def test_too_short(tmp_path):
    message = refused(write(tmp_path / "x.txt", text(100)))
    assert "only 100 calibration tokens" in message and "at least 256" in message
    many = jsonl(tmp_path / "x.jsonl", [{"text": text(MIN_TOKENS - 1)}] * 100)
    assert "only 0 calibration tokens in pieces of 16 or more" in refused(many)


def test_too_little_asked_for(tmp_path):
    path = write(tmp_path / "x.txt", text(1000))
    assert "--nsamples 0" in refused(path, nsamples=0)
    assert f"--seqlen 8: at least 1 sample of {MIN_TOKENS} tokens" in refused(path, seqlen=8)


@pytest.mark.parametrize(
    "line",
    [
        "{broken",
        "plain text",
        '{"content": "no text"}',
        '["text"]',
        '"text"',
        "3",
        "null",
        '{"text": null}',
        '{"text": 3}',
        '{"text": ["a"]}',
        r'{"text": "half a pair: \ud83d"}',
    ],
)
def test_a_bad_json_line_is_named(tmp_path, line):
    path = write(tmp_path / "x.jsonl", f'{{"text": "fine"}}\n\n{line}\n{{"text": "fine"}}\n')
    message = refused(path)
    assert f'{path}, line 3: expected a JSON object whose "text" is a string.' == message


def test_no_text_column(tmp_path):
    path = parquet(tmp_path / "x.parquet", {"content": ["a"], "id": [1]})
    assert "has columns ['content', 'id']; one named 'text' is needed" in refused(path)


def test_damaged_parquet(tmp_path):
    assert "damaged or no parquet file" in refused(write(tmp_path / "x.parquet", "no parquet"))
    whole = parquet(tmp_path / "y.parquet", {"text": [text(400)]})
    content = (tmp_path / "y.parquet").read_bytes()
    (tmp_path / "y.parquet").write_bytes(content[: len(content) // 2])
    assert f"{whole}: damaged or no parquet file" in refused(whole)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    path = parquet(tmp_path / "x.parquet", {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'billfish[eval]'" in refused(path)


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_not_utf8(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    path.write_bytes('{"text": "caf\u00e9"}'.encode("latin1"))
    message = refused(path)
    assert f"{path}: not UTF-8 text" in message and "position 13" in message


@pytest.mark.parametrize("name", ["x.csv", "x.json", "x", "x.txt.gz"])
def test_bad_suffix(tmp_path, name):
    path = write(tmp_path / name, text(400))
    assert refused(path) == f"{path}: calibration data must be .txt, .jsonl or .parquet."


@pytest.mark.parametrize("name", ["folder", "folder.txt"])
def test_a_directory(tmp_path, name):
    (tmp_path / name).mkdir()
    assert "is a directory" in refused(tmp_path / name)


# --- the hub -------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch):
    """HF_HUB_OFFLINE=1 and HF_DATASETS_OFFLINE=1, which are read at import: perhaps long ago."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("name", ["nobody/nothing-here", "nothing_here", "not a/valid name!"])
def test_an_unknown_name_without_network(offline, name):
    started = time.monotonic()
    message = refused(name)
    assert f"{name}: neither a file here nor a hub data set" in message and "'text'" in message
    assert time.monotonic() - started < 5


def test_the_hub_without_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = refused("some/name")
    assert "some/name: no such file" in message and "pip install 'billfish[eval]'" in message


def test_rows_of_a_data_set(monkeypatch):
    import datasets

    def load(name, split, streaming):
        assert (name, split, streaming) == ("some/name", "train", True)
        return ({"text": value} for value in [text(300), None, "", text(40)])

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = calibration("some/name", Words(), 9, 300, 0)
    assert [len(sequence) for sequence in found.sequences] == [300, 40]
    kept = f"{text(300)}\0{text(40)}"  # and no document "None"
    assert found.sha256 == hashlib.sha256(kept.encode()).hexdigest()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter([{"content": "a"}]))
    assert "with a 'text' column" in refused("some/name")
