"""Seeds, one thread, a tiny Llama and calibration text."""

import json
import random
import string

import pytest
import torch
from tiny import write_checkpoint


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matmuls: threads cost more than they bring
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def llama(tmp_path):
    return write_checkpoint(tmp_path / "llama")


@pytest.fixture
def text(tmp_path):
    """Calibration documents of different lengths."""
    source = random.Random(0)
    words = [
        "".join(source.choices(string.ascii_lowercase, k=source.randint(2, 8))) for _ in range(99)
    ]
    rows = [" ".join(source.choices(words, k=source.choice((6, 12, 40)))) for _ in range(24)]
    path = tmp_path / "calibration.jsonl"
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    return str(path)
