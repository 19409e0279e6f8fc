"""Kernels compiled once, and layers that many tests share."""

import pytest
import torch
from w4a16_layers import DEVICE, LAYERS, SCHEMES, SHARED, UNIT, op_of

from billfish.kernels import cache, jit
from billfish.kernels.device import gpu
from billfish.schemes import registry


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """All kernels, side by side, in a cache of the tests' own."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BILLFISH_CACHE_DIR", str(folder))
        patch.setattr(cache, "_memory", {})
        arch = gpu(DEVICE).arch
        wanted = {
            program: None
            for scheme in SCHEMES
            for dtype in UNIT
            for listed in (arch, "sm_80")  # the latter's run here, too
            for program in registry.programs([scheme], dtype, listed)
        }
        jit.build_all(list(wanted), arch)
        yield folder


@pytest.fixture(scope="session")
def shared(compiled):
    torch.manual_seed(0)
    return {
        (op_class, key, dtype): op_of(op_class, *SHARED[key], dtype)
        for op_class, key, dtype in LAYERS
    }


@pytest.fixture(params=LAYERS, ids=lambda v: f"{v[0].name}-{v[1]}-{str(v[2])[6:]}")
def layer(request, shared):
    """(op, weight, n, k, dtype)"""
    op, weight = shared[request.param]
    return op, weight, *weight.shape, request.param[2]
