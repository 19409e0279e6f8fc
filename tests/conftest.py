"""Seeds, one thread, a tiny Llama and calibration text."""

import gc
import json
import random
import string

import pytest
import torch
from tiny import write_checkpoint

# Files that take 15 s and more, the longest first: no worker shall be left alone with one.
LONG = (
    "test_real_model.py",
    "test_driver.py",
    "test_experts_kernels.py",
    "test_compile.py",
    "test_emulated.py",
    "test_w2416_kernels.py",
    "test_finetune.py",
    "test_w4ax_kernels.py",
    "test_w4ax_stripe.py",
    "test_memory.py",
    "test_cli.py",
    "test_head.py",
    "test_w4a16_24_kernels.py",
    "test_w4a16_normed.py",
    "test_w4a16_24_stripe.py",
    "test_server_limits.py",
    "test_sentinel.py",
    "test_quantize_experts.py",
    "test_compute.py",
    "test_written_experts.py",
    "test_w4ax_rounding.py",
    "test_sampling.py",
    "test_bench_serve.py",
)
torch.set_num_threads(1)  # tiny matmuls: threads cost more than they bring


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """8000 tests are garbage at no time: looking for some took 4 s of the 16 of collecting them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


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
