import pytest
from served import served
from tiny import write_checkpoint


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("server") / "llama")


@pytest.fixture(scope="module")
def server(tiny_path):
    with served(tiny_path, max_num_seqs=8) as made:
        yield made
        assert made.settle() == 0
