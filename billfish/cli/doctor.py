"""`billfish doctor`: what works on this machine, and how to repair what does not.

A problem will not work, and comes with a fix; a note could be faster, is untested or is missing but
optional. Nothing is written or installed, and no package is imported for its version alone. One
small kernel is compiled, in memory.
"""

import importlib
import os
import platform
import re
import shutil
import stat
import time
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

import torch
from packaging.version import Version

from billfish.errors import UserError
from billfish.kernels import cpu, jit
from billfish.kernels.cache import directory as cache_directory
from billfish.kernels.device import HOPPER, gpu
from billfish.kernels.launch import Loaded, LoadError
from billfish.models.compute import VARIABLE, cpu_type
from billfish.schemes import SCHEMES
from billfish.schemes.registry import ops_of, with_options

CPUINFO = Path("/proc/cpuinfo")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
DRIVER = Path("/proc/driver/nvidia/version")
PROBE = jit.Program(Path(jit.__file__).parent / "probe.cuh", "billfish::probe<3>")
LITTLE_DISK = 10**9  # bytes, below which the cache of compiled kernels may not fit


@dataclass(frozen=True)
class Finding:
    name: str
    status: Literal["ok", "note", "problem"]
    detail: str
    fix: str | None = None


@dataclass(frozen=True)
class Package:
    name: str  # as pip calls it
    least: str
    tested: tuple[str, str] | None = None  # the first and the last minor release
    why: str = ""


REQUIRED = (
    Package("torch", "2.10", ("2.11", "2.13")),
    Package("transformers", "5.3", ("5.17", "5.22"), " Older ones run code from config.json."),
    Package("safetensors", "0.4.5"),
)
EXTRAS = {  # package -> (extra, what it is for)
    "lm-eval": ("eval", "zero-shot tasks through lm-eval"),
    "pyarrow": ("eval", "parquet files"),
    "gguf": ("gguf", "GGUF files"),
    "cuda-core": ("cuda", "compiling CUDA kernels"),
}


def diagnose() -> list[Finding]:
    return [
        check_python(),
        *map(check_package, REQUIRED),
        *map(check_extra, EXTRAS),
        check_cpu(),
        check_compute_type(),
        check_threads(),
        check_cpu_kernels(),
        check_gpu(),
        check_nvrtc(),
        check_cuda_kernels(),
        check_cache(),
        check_disk(),
        check_hub(),
    ]


# -- packages


def check_python() -> Finding:
    version = platform.python_version()
    if release(version) < Version("3.11"):
        fix = "Make an environment with Python 3.11 or newer and install Billfish there."
        return Finding("python", "problem", f"{version}; 3.11 or newer is needed.", fix)
    return Finding("python", "ok", version)


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> Version:
    """Without pre-release and build: 2.14.0a0+cpu counts as 2.14.0."""
    return Version(Version(version).base_version)


def check_package(wanted: Package) -> Finding:
    version, least = installed(wanted.name), wanted.least
    fix = f"pip install '{wanted.name}>={least}'"
    if version is None:
        return Finding(wanted.name, "problem", f"not installed; {least} or newer is needed.", fix)
    found = release(version)
    if found < Version(least):
        detail = f"{version}; {least} or newer is needed.{wanted.why}"
        return Finding(wanted.name, "problem", detail, fix)
    if wanted.tested:
        first, last = wanted.tested
        if not Version(first) <= Version(f"{found.major}.{found.minor}") <= Version(last):
            return Finding(wanted.name, "note", f"{version}; tested are {first} to {last}.")
    return Finding(wanted.name, "ok", version)


def check_extra(name: str) -> Finding:
    version, (group, purpose) = installed(name), EXTRAS[name]
    if version is None:
        fix = f"pip install 'billfish[{group}]'"
        return Finding(name, "note", f"not installed; optional, for {purpose}.", fix)
    return Finding(name, "ok", f"{version}, for {purpose}")


# -- processor


def check_cpu() -> Finding:
    info = CPUINFO.read_text(errors="replace") if CPUINFO.is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags_line = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    flags = set(flags_line[1].split()) if flags_line else set()
    name = model[1] if model else platform.processor() or platform.machine()
    known = {
        "avx2": "AVX2",
        "avx512f": "AVX512",
        "avx512_bf16": "AVX512-BF16",
        "amx_bf16": "AMX-BF16",
        "amx_int8": "AMX-INT8",
    }
    has = [label for flag, label in known.items() if flag in flags]
    used = torch.backends.cpu.get_cpu_capability()
    detail = f"{name}; has {', '.join(has) or 'no AVX2, AVX512 or AMX'}; PyTorch uses {used}"
    if used in ("DEFAULT", "NO AVX"):
        fix = "unset ATEN_CPU_CAPABILITY" if "ATEN_CPU_CAPABILITY" in os.environ else None
        return Finding("cpu", "note", f"{detail}: without vector instructions all is slow.", fix)
    return Finding("cpu", "ok", detail)


def check_compute_type() -> Finding:
    """The dtype in which the CPU computes with weights stored in 16 bits."""
    try:
        chosen = cpu_type()
    except UserError as error:
        return Finding("cpu type", "problem", str(error), f"unset {VARIABLE}")
    detail = f"models of 16 bits compute in {chosen.name} on this CPU: {chosen.why}."
    return Finding("cpu type", "ok", f"{detail} --dtype or {VARIABLE} can say otherwise.")


def usable_cores() -> int:
    """By the process's CPU affinity and its container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    if CPU_QUOTA.is_file():
        quota, _, period = CPU_QUOTA.read_text().partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            count = min(count, max(1, int(quota) // int(period)))
    return count


def check_threads() -> Finding:
    running, cores = torch.get_num_threads(), usable_cores()
    detail = f"PyTorch computes with {running} threads, {cores} cores can be used"
    if running > cores:
        fix = f"export OMP_NUM_THREADS={cores}"
        return Finding("threads", "note", f"{detail}: they wait for each other.", fix)
    if running < cores and "OMP_NUM_THREADS" in os.environ:
        asked = os.environ["OMP_NUM_THREADS"]
        fix = f"export OMP_NUM_THREADS={cores}, unless the other cores are for others"
        return Finding("threads", "note", f"{detail}; OMP_NUM_THREADS is {asked}.", fix)
    return Finding("threads", "ok", detail)


def check_cpu_kernels() -> Finding:
    """The instruction set that llvmlite compiles the CPU's kernels for."""
    if installed("llvmlite") is None:
        return Finding(
            "cpu kernels",
            "problem",
            "llvmlite, which compiles them, is not installed.",
            "pip install llvmlite",
        )
    try:
        found = cpu.isa()
    except UserError as error:
        return Finding("cpu kernels", "problem", str(error), f"unset {cpu.VARIABLE}")
    team = "threads of PyTorch's" if cpu.openmp() else "one thread: PyTorch's are not OpenMP's"
    detail = f"{found.name}, {found.lanes} outputs at a time, {team}"
    if found.name == "plain":
        return Finding("cpu kernels", "note", f"{detail}; no instruction multiplies bytes: slow.")
    return Finding("cpu kernels", "ok", detail)


# -- GPU


def fast_on_gpu(name: str) -> bool:
    """Whether a scheme has an op beside the reference that runs on this GPU."""
    scheme, device = with_options(name), torch.device("cuda")
    return any(op.refuses(scheme, 4096, 4096, device) is None for op in ops_of(scheme)[:-1])


def check_gpu() -> Finding:
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(0)
        memory = torch.cuda.get_device_properties(0).total_memory
        detail = (
            f"{torch.cuda.get_device_name(0)}, compute capability {major}.{minor}, "
            f"{memory / 2**30:.0f} GiB; {torch.cuda.device_count()} in all."
        )
        runs = [name for name in SCHEMES if fast_on_gpu(name)]
        missing = [name for name in SCHEMES if name not in runs]
        if missing:
            detail += f" {', '.join(missing)}: no kernel for it; such models run on the CPU."
        elif (major, minor) > HOPPER:
            detail += (
                " Kernels for 16 tokens and fewer are compiled for it, never run by us there; more "
                "tokens go through decoded weights and cuBLAS."
            )
        if runs and (major, minor) != HOPPER:
            detail += " The engine's own kernels are for 9.0: here it runs through PyTorch's."
        return Finding("gpu", "ok" if (major, minor) == HOPPER and runs else "note", detail)
    if not DRIVER.is_file() and shutil.which("nvidia-smi") is None:
        return Finding("gpu", "ok", "none that PyTorch or an NVIDIA driver knows.")
    if torch.version.cuda is None:
        detail = f"an NVIDIA driver is here, but PyTorch {torch.__version__} is a CPU-only build."
        fix = "For a GPU, install a CUDA build of PyTorch: https://pytorch.org/get-started/locally"
        return Finding("gpu", "note", detail, fix)
    detail = (
        f"an NVIDIA driver is here, but PyTorch {torch.__version__} (CUDA {torch.version.cuda}) "
        "finds no device."
    )
    fix = "Check CUDA_VISIBLE_DEVICES, and with nvidia-smi that the driver is new enough."
    return Finding("gpu", "note", detail, fix)


def check_nvrtc() -> Finding:
    """The compiler of CUDA kernels: cuda.core, cuda.bindings and libnvrtc."""
    fix = "pip install 'billfish[cuda]'"
    missing = [name for name in ("cuda.core", "cuda.bindings") if not importable(name)]
    if missing:
        detail = f"{' and '.join(missing)} not installed; only CUDA kernels need them."
        return Finding("nvrtc", "note", detail, fix)
    try:
        code, major, minor = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        detail = f"cuda.bindings is here, libnvrtc cannot be loaded ({reason})."
        return Finding("nvrtc", "note", detail, "pip install 'cuda-bindings[all]'")
    if int(code) != 0:
        return Finding("nvrtc", "note", f"libnvrtc answers with error {int(code)}.", fix)
    return Finding("nvrtc", "ok", f"{major}.{minor}")


def check_cuda_kernels() -> Finding:
    """Compiles a small kernel and, if there is a GPU, runs it and checks its results."""
    here = torch.cuda.is_available()
    arch = gpu().arch if here else "sm_90a"
    begin = time.perf_counter()
    try:
        cubin = jit.compile(PROBE, arch)  # without the cache: this tests the compiler
        seconds = time.perf_counter() - begin
        if not here:
            return Finding("kernels", "ok", f"compile ({arch}, {seconds:.2f} s); no GPU to run on")
        wrong = run_probe(cubin)
    except (UserError, RuntimeError) as error:
        fix = "pip install 'billfish[cuda]'"
        if isinstance(error, jit.CompileError):
            fix = f"Install an NVRTC that knows {arch}: {fix}"
        elif isinstance(error, LoadError):
            fix = "Update the NVIDIA driver: what NVRTC 13.x compiles needs 580 or newer."
        elif not isinstance(error, UserError):
            fix = "See nvidia-smi: whether the GPU is healthy, free and has memory left."
        detail = " ".join(str(error).split())
        return Finding("kernels", "problem" if here else "note", detail, fix)
    if wrong:
        fix = "Test the GPU (nvidia-smi -q -d ECC), and that PyTorch and the driver fit together."
        return Finding("kernels", "problem", f"compile and run, but {wrong}", fix)
    return Finding("kernels", "ok", f"compile ({arch}, {seconds:.2f} s), run, and compute right")


def run_probe(cubin: jit.Cubin) -> str | None:
    """What is wrong with its results, if anything; the kernel computes y[i] = 3 x[i] + i."""
    x = torch.arange(1000, dtype=torch.float32, device="cuda").flip(0)
    y = torch.empty_like(x)
    block = 128
    arguments = (y.data_ptr(), x.data_ptr(), len(x))
    Loaded(cubin, gpu(), PROBE.name).launch(-(-len(x) // block), block, arguments)
    expected = 3 * x.cpu() + torch.arange(len(x))
    different = int((y.cpu() != expected).sum())
    return f"{different} of {len(x)} numbers are wrong." if different else None


def importable(name: str) -> bool:
    try:
        return util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


# -- directories


def nearest(path: Path) -> Path:
    """The path or its nearest parent that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if os.path.exists(place))


def check_cache() -> Finding:
    place = cache_directory()
    there = nearest(place)
    elsewhere = "or set BILLFISH_CACHE_DIR to a directory of your own"
    if not there.is_dir():
        fix = f"Move {there} away, {elsewhere}."
        return Finding("cache", "problem", f"{place}: {there} is not a directory.", fix)
    if not os.access(there, os.W_OK | os.X_OK):
        fix = f"Make {there} writable for you, {elsewhere}."
        return Finding("cache", "problem", f"{place}: {there} cannot be written to.", fix)
    if there != place.absolute():
        return Finding("cache", "ok", f"{place}, made when it is needed")
    status = place.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        detail = f"{place}: belongs to user {status.st_uid}, who could change compiled kernels."
        return Finding("cache", "note", detail, f"chown it to yourself, {elsewhere}.")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        detail = f"{place}: others may write to it, and so change compiled kernels."
        return Finding("cache", "note", detail, f"chmod 700 '{place}'")
    return Finding("cache", "ok", f"{place}, writable by you alone")


def check_disk() -> Finding:
    place = nearest(cache_directory())
    free = shutil.disk_usage(place).free
    detail = f"{free / 1e9:.1f} GB free at {place}"
    if free < LITTLE_DISK:
        fix = "Make room, or set BILLFISH_CACHE_DIR to a larger disk."
        return Finding("disk", "note", f"{detail}: little.", fix)
    return Finding("disk", "ok", detail)


def check_hub() -> Finding:
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    detail = f"Hugging Face files are kept in {home}"
    if offline:
        detail += "; HF_HUB_OFFLINE is set, so hub names work only if they are there already."
        return Finding("hub", "note", detail, "unset HF_HUB_OFFLINE")
    return Finding("hub", "ok", detail)
