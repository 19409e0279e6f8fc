"""Makes tests/models/foreign_fixtures.py importable from here; tiny models run on one thread."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of a tiny matmul cost more than they bring: 40 % of these tests' time."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)
