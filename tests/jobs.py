"""Small jobs of quantizing, for the tests of whoever runs one."""

from pathlib import Path

import pytest

from billfish.offline import driver
from billfish.offline.driver import quantize
from billfish.offline.request import QuantizeRequest
from billfish.schemes.w4a16 import W4A16

SMALL = {"nsamples": 8, "seqlen": 64}
SCHEME = W4A16(bits=4, group_size=32)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def request(model, output, text, **changes):
    """Without the sentinel, which takes a third of a small job: test_sentinel.py has it."""
    values = {"scheme": SCHEME, "method": "gptq", "data": text, "check": False, **SMALL, **changes}
    return QuantizeRequest(model, output, **values)


def stop_before_the_end(monkeypatch, wanted):
    def stop(self, data):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(driver.Job, "_finish", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize(wanted)
