"""Tiny models, a tokenizer of one character a token, made-up data: for the tests of evaluate/."""

import json
import random
import socket
import string
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from billfish.evaluate.tasks import TASKS, ZeroShotTask

VOCABULARY = 256
ZERO_SHOT = [name for name, task in TASKS.items() if isinstance(task, ZeroShotTask)]


def tiny_llama(seed: int, vocabulary: int = VOCABULARY, spread: float = 0.3) -> LlamaForCausalLM:
    """Random, with weights large enough that its predictions differ between tokens and models."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=spread,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def llama() -> Callable[..., LlamaForCausalLM]:
    return tiny_llama


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    characters = ["<eos>", "<unk>", *string.printable]
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", unk_token="<unk>", model_max_length=512
    )


@pytest.fixture
def checkpoint(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> Callable[[str, LlamaForCausalLM], Path]:
    def write(name: str, model: LlamaForCausalLM) -> Path:
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return write


def words(source, low, high):
    return " ".join(
        "".join(source.choices(string.ascii_lowercase, k=source.randint(1, 6)))
        for _ in range(source.randint(low, high))
    )


def made_up_row(name, source):
    if name == "piqa":
        goal, options = words(source, 2, 5), [words(source, 1, 6) for _ in range(2)]
        return {"goal": goal, "sol1": options[0], "sol2": options[1], "label": source.randint(0, 1)}
    if name == "winogrande":
        return {
            "context_options": [words(source, 2, 5) for _ in range(2)],
            "continuation": words(source, 1, 3),
            "gold": source.randint(0, 1),
        }
    if name == "lambada":
        return {"context": words(source, 3, 6), "continuation": "a"}
    key = "query" if name == "hellaswag" else "question"
    count = source.randint(3, 5) if name.startswith("arc") else 4
    choices = [words(source, 1, 6) for _ in range(count)]
    return {
        key: words(source, 3, 6),
        "choices": choices,
        "gold": source.randrange(count),
        "id": "x",
    }


@pytest.fixture
def data_dir(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ZERO_SHOT:
        source = random.Random(name)
        rows = [made_up_row(name, source) for _ in range(12)]
        (folder / TASKS[name].file).write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    text = " \n = Title = \n \n" + words(random.Random(0), 200, 200) + " \n"
    (folder / "wikitext2_test.raw.txt").write_text(text)
    return folder


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("something asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
