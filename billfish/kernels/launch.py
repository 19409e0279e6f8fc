"""A compiled kernel on a GPU, launched on torch's current stream.

`Kernel(program)` costs nothing; `load` compiles, or takes the cubin from the cache, once a device;
`launch` runs per call and looks nothing up twice. Knows pointers and numbers, not tensors: the
caller keeps the memory alive and on this device.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from billfish.errors import UserError
from billfish.kernels import jit
from billfish.kernels.device import Gpu, gpu

Grid = int | tuple[int, ...]

PORTABLE_CLUSTER = 8  # blocks; for 16 on Hopper an attribute must be set
FREE_SMEM = 48 * 1024  # dynamic bytes that need no attribute
MOST_CONFIGS = 4096  # prefill has a grid for every number of tokens; a config has about 200 bytes
LEGACY_STREAM = 1  # CU_STREAM_LEGACY: torch's handle 0, as a handle that is not null

# Process-wide, not an argument: a benchmark turns it off around a whole model, whose layers it does
# not call itself. Read at each launch, so a captured graph keeps the setting of its capture.
_dependent_launches = True


@contextmanager
def plain_launches() -> Iterator[None]:
    """Without programmatic dependent launch: kernels do not overlap. For benchmarks."""
    global _dependent_launches
    before, _dependent_launches = _dependent_launches, False
    try:
        yield
    finally:
        _dependent_launches = before


@dataclass(frozen=True)
class Attributes:
    registers: int
    local_bytes: int  # stack and spills of a thread
    smem_bytes: int  # static
    max_threads: int  # of a block


class LoadError(UserError):
    """The driver rejects a cubin; usually it is older than the compiler."""


class Kernel:
    """A program, loaded at most once on each device."""

    def __init__(self, program: jit.Program) -> None:
        self.program = program
        self._loaded: dict[int, Loaded] = {}
        self._lock = threading.Lock()

    def load(self, device: torch.device | int | None = None) -> "Loaded":
        index = device.index if isinstance(device, torch.device) else device
        loaded = self._loaded.get(index)  # type: ignore[arg-type]  # None is never a key
        return loaded or self._load(gpu(device))

    def _load(self, found: Gpu) -> "Loaded":
        index = found.index
        with self._lock:
            if index not in self._loaded:
                if torch.cuda.is_current_stream_capturing():
                    raise UserError(
                        f"{self.program.name} is not loaded on cuda:{index}, and a CUDA graph is "
                        "being captured, in which nothing can be compiled or loaded. Call the "
                        "layer once before the capture; `billfish kernels warmup` before that "
                        "saves the compiling, not this call."
                    )
                cubin = jit.build(self.program, found.arch)
                self._loaded[index] = Loaded(cubin, found, self.program.name)
            return self._loaded[index]


class Loaded:
    """A kernel loaded on one GPU."""

    def __init__(self, cubin: jit.Cubin, gpu: Gpu, name: str) -> None:
        self.cubin, self.gpu, self.name = cubin, gpu, name
        self._index = gpu.index
        self._configs: dict[Any, Any] = {}
        try:
            from cuda import core
            from cuda.bindings import driver
        except ImportError as error:
            raise UserError(
                f"CUDA kernels are launched through cuda-core, which cannot be imported ({error}). "
                "pip install 'billfish[cuda]'"
            ) from None
        self._core, self._driver, self._launch = core, driver, core.launch
        with torch.cuda.device(self._index):
            self._enter_context()
            try:
                self._code = code = core.ObjectCode.from_cubin(cubin.code, name=name)
                self._kernel = code.get_kernel(cubin.symbol)
                self._handle = driver.CUkernel(int(self._kernel.handle))
                # Modules load lazily by default, and loading inside a graph capture fails.
                function = self._ask(driver.cuKernelGetFunction(self._handle))
                self._ask(driver.cuFuncLoad(function))
            except Exception as error:  # cuda.core and the driver have exceptions of their own
                raise LoadError(_not_loadable(name, gpu, str(error))) from error
            self.attributes = self._read_attributes()
            # The maximum, once: it permits and does not reserve. What a launch asks for decides
            # how many blocks fit on an SM.
            self.most_smem = gpu.smem_per_block - self.attributes.smem_bytes
            if self.most_smem > FREE_SMEM:
                self._allow("MAX_DYNAMIC_SHARED_SIZE_BYTES", self.most_smem)
            # The largest shared-memory carveout for every kernel: one with another carveout would
            # have to wait until the SM is empty.
            self._allow("PREFERRED_SHARED_MEMORY_CARVEOUT", 100)

    def launch(
        self,
        grid: Grid,  # blocks, also with clusters
        block: int,  # threads
        args: tuple[Any, ...],
        smem: int = 0,  # dynamic bytes
        cluster: int = 1,  # blocks along x
        pdl: bool = False,  # the kernel itself waits for the previous one (griddepcontrol.wait)
    ) -> None:
        """On torch's current stream of the kernel's device, which need not be torch's current one.

        `args` in the kernel's order: Python ints for pointers (tensor.data_ptr()) and for integers
        of any width, since the driver takes as many bytes as the parameter has from eight,
        lowest first; bools for bool. Floats only as numpy or ctypes scalars of the right width: a
        Python float is a double. Not checked against the kernel's signature.
        """
        key = (grid, block, smem, cluster, pdl and _dependent_launches)
        config = self._configs.get(key) or self._configure(key)
        index = self._index
        handle = torch._C._cuda_getCurrentRawStream(index)
        stream = _streams.get(handle) or _stream(handle)
        if torch._C._cuda_getDevice() == index:
            try:
                self._launch(stream, config, self._kernel, *args)
            except Exception:
                if not self._enter_context():
                    raise
                self._launch(stream, config, self._kernel, *args)
        else:
            with torch.cuda.device(index):
                self._launch(stream, config, self._kernel, *args)

    def max_active_clusters(self, block: int, smem: int = 0, cluster: int = 1) -> int:
        """How many clusters of this kernel the whole GPU holds at once."""
        with torch.cuda.device(self._index):
            config = self._configure((cluster, block, smem, cluster, False))
            stream = _stream(torch._C._cuda_getCurrentRawStream(self._index))
            return int(self._kernel.occupancy.max_active_clusters(config, stream=stream))

    def _enter_context(self) -> bool:
        """True if this thread had no CUDA context; now it has torch's.

        A thread gets one by its first call of the CUDA runtime, and a thread that takes all memory
        from torch's cache may launch before. Checking at every launch would cost time; failing once
        a thread does not.
        """
        if int(self._ask(self._driver.cuCtxGetCurrent())):
            return False
        device = self._ask(self._driver.cuDeviceGet(self._index))
        self._ask(
            self._driver.cuCtxSetCurrent(self._ask(self._driver.cuDevicePrimaryCtxRetain(device)))
        )
        return True

    def _configure(self, key: tuple[Grid, int, int, int, bool]) -> Any:
        grid, block, smem, cluster, pdl = key
        if smem > self.most_smem:
            raise ValueError(
                f"{self.name}: {smem} bytes of shared memory asked for, {self.gpu.name} gives this "
                f"kernel {self.most_smem}"
            )
        with torch.cuda.device(self._index):  # cuda.core asks the current device about clusters
            if cluster > PORTABLE_CLUSTER:
                self._allow("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
            config = self._core.LaunchConfig(
                grid=in_clusters(grid, cluster),
                block=block,
                cluster=cluster if cluster > 1 else None,
                shmem_size=smem,
                programmatic_stream_serialization=pdl,
            )
        if len(self._configs) >= MOST_CONFIGS:
            self._configs.clear()
        self._configs[key] = config
        return config

    def _read_attributes(self) -> Attributes:
        driver, device = self._driver, self._ask(self._driver.cuDeviceGet(self._index))

        def read(name: str) -> int:
            attribute = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
            return int(self._ask(driver.cuKernelGetAttribute(attribute, self._handle, device)))

        names = ("NUM_REGS", "LOCAL_SIZE_BYTES", "SHARED_SIZE_BYTES", "MAX_THREADS_PER_BLOCK")
        return Attributes(*map(read, names))

    def _allow(self, name: str, value: int) -> None:
        attribute = getattr(self._driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        device = self._ask(self._driver.cuDeviceGet(self._index))
        self._ask(self._driver.cuKernelSetAttribute(attribute, value, self._handle, device))

    def _ask(self, answer: tuple[Any, ...]) -> Any:
        code, *values = answer
        if int(code) != 0:
            raise RuntimeError(f"{self.name} on cuda:{self._index}: the driver answers {code!r}")
        return values[0] if values else None


def in_clusters(grid: Grid, cluster: int) -> tuple[int, ...]:
    """A grid in blocks -> cuda.core's, which counts clusters along x."""
    x, *others = (grid,) if isinstance(grid, int) else grid
    if x % cluster:
        raise ValueError(f"a grid of {x} blocks is not whole clusters of {cluster}")
    return (x // cluster, *others)


# torch never destroys its streams, so a handle means the same stream for the process's life.
_streams: dict[int, Any] = {}


def _stream(handle: int) -> Any:
    from cuda.core import Stream

    found = _streams.get(handle)
    if found is None:
        found = _streams[handle] = Stream.from_handle(handle or LEGACY_STREAM)
    return found


def _not_loadable(name: str, gpu: Gpu, reason: str) -> str:
    return (
        f"{name}: compiled by NVRTC {jit.version()} for {gpu.arch}, but {gpu.name} does not load "
        f"it ({reason}). Code of NVRTC 13.x needs an NVIDIA driver of version 580 or newer: see "
        "nvidia-smi, and update the driver if it is older."
    )
