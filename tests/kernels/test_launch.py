"""Launching as far as it goes without a GPU: configurations, streams, devices, refusals."""

import ctypes
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from billfish.errors import UserError
from billfish.kernels import device, jit, launch
from billfish.kernels.device import Gpu, arch_of, capability
from billfish.kernels.jit import Program
from billfish.kernels.launch import Kernel, Loaded, in_clusters, plain_launches

PROBE = Program(Path(jit.__file__).parent / "probe.cuh", "billfish::probe<3>")
H100 = Gpu(1, "NVIDIA H100", "sm_90a", 132, 232448, 233472, 50 * 2**20)


# -- device


def test_architectures():
    known = {
        (8, 0): "sm_80",
        (8, 6): "sm_86",
        (8, 9): "sm_89",
        (9, 0): "sm_90a",
        (10, 0): "sm_100a",
        (10, 3): "sm_103a",
        (12, 0): "sm_120a",
    }
    assert {version: arch_of(*version) for version in known} == known


@pytest.mark.parametrize(
    ("arch", "version"),
    [("sm_80", (8, 0)), ("sm_90a", (9, 0)), ("sm_100f", (10, 0)), ("sm_120a", (12, 0))],
)
def test_capability(arch, version):
    assert capability(arch) == version


@pytest.mark.parametrize("arch", ["", "sm_", "sm_9", "sm_90b", "compute_90", "90", "sm_90a "])
def test_no_architecture(arch):
    with pytest.raises(UserError, match="sm_90a"):
        capability(arch)


def test_gpu_is_asked_once(monkeypatch):
    asked = []

    def properties(index):
        asked.append(index)
        return SimpleNamespace(
            name="NVIDIA H100",
            major=9,
            minor=0,
            multi_processor_count=132,
            shared_memory_per_block_optin=232448,
            shared_memory_per_multiprocessor=233472,
            L2_cache_size=50 * 2**20,
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    device._gpu.cache_clear()
    try:
        for name in (1, None, torch.device("cuda"), torch.device("cuda:1")):
            assert device.gpu(name) == H100
        assert asked == [1]
        with pytest.raises(ValueError, match="not cpu"):
            device.gpu(torch.device("cpu"))
    finally:
        device._gpu.cache_clear()


def test_no_gpu_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in (None, 0, torch.device("cuda")):
        with pytest.raises(UserError, match="billfish doctor"):
            Kernel(PROBE).load(name)


# -- configurations and launches, on a driver that only notes


@pytest.fixture
def card(monkeypatch):
    """A kernel loaded on cuda:1, and what cuda.core would have been told."""
    seen = SimpleNamespace(launches=[], configs=[], allowed=[], current=1, entered=[], stream=0)
    loaded = Loaded.__new__(Loaded)
    loaded.name, loaded.gpu, loaded._index = "probe", H100, 1
    loaded.most_smem, loaded._configs, loaded._kernel = H100.smem_per_block, {}, "kernel"

    def configure(**options):
        seen.configs.append(options)
        return SimpleNamespace(**options)

    @contextmanager
    def enter(index):
        seen.entered.append(index)
        before, seen.current = seen.current, index
        yield
        seen.current = before

    def start(stream, config, kernel, *args):
        assert seen.current == 1 and kernel == "kernel"
        seen.launches.append((stream, config, args))

    loaded._core = SimpleNamespace(LaunchConfig=configure)
    loaded._launch = start
    monkeypatch.setattr(loaded, "_allow", lambda name, value: seen.allowed.append((name, value)))
    monkeypatch.setattr(launch, "_streams", {0: "legacy", 7: "side"})
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: seen.stream, raising=False
    )
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: seen.current, raising=False)
    return loaded, seen


def test_grids_count_blocks():
    assert in_clusters(12, 1) == (12,)
    assert in_clusters(12, 4) == (3,)
    assert in_clusters((12, 5), 4) == (3, 5)
    with pytest.raises(ValueError, match="10 blocks is not whole clusters of 4"):
        in_clusters(10, 4)


def test_a_configuration_is_made_once(card):
    loaded, seen = card
    for pointer in (16, 32):
        loaded.launch((8, 3), 256, (pointer, 5), smem=100_000, cluster=2, pdl=True)
    assert seen.configs == [
        {
            "grid": (4, 3),
            "block": 256,
            "cluster": 2,
            "shmem_size": 100_000,
            "programmatic_stream_serialization": True,
        }
    ]
    assert [args for _, _, args in seen.launches] == [(16, 5), (32, 5)]
    loaded.launch(8, 256, ())
    assert seen.configs[1] == {
        "grid": (8,),
        "block": 256,
        "cluster": None,
        "shmem_size": 0,
        "programmatic_stream_serialization": False,
    }
    assert seen.allowed == []
    loaded.launch(16, 256, (), cluster=16)
    assert seen.allowed == [("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)]


def test_configurations_do_not_pile_up(card, monkeypatch):
    loaded, _ = card
    monkeypatch.setattr(launch, "MOST_CONFIGS", 10)
    for grid in range(1, 40):
        loaded.launch(grid, 256, ())
    assert len(loaded._configs) <= 10


def test_plain_launches(card):
    loaded, seen = card

    def dependent():
        loaded.launch(8, 256, (), pdl=True)
        return seen.launches[-1][1].programmatic_stream_serialization

    assert dependent()
    with pytest.raises(KeyError), plain_launches():
        with plain_launches():
            assert not dependent()
        assert not dependent()
        raise KeyError
    assert dependent()


def test_stream_and_device(card):
    loaded, seen = card
    loaded.launch(1, 32, ())
    seen.stream = 7
    loaded.launch(1, 32, ())
    assert [stream for stream, _, _ in seen.launches] == ["legacy", "side"]
    seen.entered.clear()
    loaded.launch(1, 32, ())
    assert seen.entered == []  # the guard costs more than the rest: only where it is needed
    seen.current = 0
    loaded.launch(1, 32, ())
    assert seen.entered == [1] and len(seen.launches) == 4


@pytest.mark.parametrize("context", [0, 99])
def test_a_thread_without_a_context(card, context):
    loaded, seen = card
    start, entered = loaded._launch, []

    def needs_context(*args):
        if not entered:
            raise RuntimeError("CUDA_ERROR_INVALID_CONTEXT")
        start(*args)

    loaded._launch = needs_context
    loaded._driver = SimpleNamespace(
        cuCtxGetCurrent=lambda: (0, context),
        cuDeviceGet=lambda index: (0, f"device {index}"),
        cuDevicePrimaryCtxRetain=lambda device: (0, f"context of {device}"),
        cuCtxSetCurrent=lambda context: entered.append(context) or (0,),
    )
    if context:  # it was something else: told, not tried again
        with pytest.raises(RuntimeError, match="INVALID_CONTEXT"):
            loaded.launch(1, 32, ())
        assert not entered and not seen.launches
    else:
        loaded.launch(1, 32, (5,))
        assert entered == ["context of device 1"] and len(seen.launches) == 1


def test_too_much_shared_memory(card):
    loaded, seen = card
    with pytest.raises(ValueError, match=r"232449 bytes.*gives this kernel 232448"):
        loaded.launch(1, 32, (), smem=232449)
    assert seen.launches == []


def test_arguments_are_eight_bytes_lowest_first():
    """What the docstring of launch promises of Python ints rests on this."""
    handler = pytest.importorskip("cuda.core._kernel_arg_handler")
    args = (2**47 + 8, -7, 300, np.float32(2.5), True)
    holder = handler.ParamHolder(args)
    slots = (ctypes.c_void_p * len(args)).from_address(holder.ptr)
    kinds = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_int16, ctypes.c_float, ctypes.c_bool)
    got = [kind.from_address(slot).value for kind, slot in zip(kinds, slots, strict=True)]
    assert got == [2**47 + 8, -7, 300, 2.5, True]


# -- loading


@pytest.fixture
def loading(monkeypatch):
    made = []

    class FakeLoaded:
        def __init__(self, cubin, gpu, name):
            made.append((cubin, gpu.index, name))

    monkeypatch.setattr(launch, "Loaded", FakeLoaded)
    monkeypatch.setattr(launch, "gpu", lambda name: H100)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(jit, "build", lambda program, arch: f"{program.name} {arch}")
    return made


def test_load_is_done_once_a_device(loading):
    kernel = Kernel(PROBE)
    first = kernel.load(torch.device("cuda", 1))
    assert kernel.load(1) is first and kernel.load(torch.device("cuda")) is first
    assert kernel.load() is first
    assert loading == [("billfish::probe<3> sm_90a", 1, "billfish::probe<3>")]


def test_nothing_is_loaded_during_a_capture(loading, monkeypatch):
    kernel = Kernel(PROBE)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UserError) as caught:
        kernel.load(1)
    for part in (PROBE.name, "cuda:1", "Call the layer once before", "billfish kernels warmup"):
        assert part in str(caught.value)
    assert loading == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    loaded = kernel.load(1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert kernel.load(1) is loaded
