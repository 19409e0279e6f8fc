"""NVRTC: one CUDA source and one C++ name expression -> a cubin, with ptxas' report.

Straight to machine code of one architecture, through cuda.core: no PTX step, no CUDA toolkit, no
GPU. The disk cache is our own: cuda.core's refuses programs with include paths or name expressions.
Sources include "billfish/*.cuh" alone: CUDA's headers cost seconds a kernel. A failure shows the
compiler's log with the source's own file and line. BILLFISH_JIT_DEBUG=1 adds line numbers for
profilers and reports on stderr what compiles and how long it takes.
"""

import io
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache as once
from pathlib import Path
from typing import Any

from billfish.errors import UserError
from billfish.kernels import cache
from billfish.kernels.device import arch_of

INCLUDE = Path(__file__).parent / "include"
OPTIONS = {
    "std": "c++17",
    "ptxas_options": "-v",  # registers and spills, into the log
    "device_as_default_execution_space": True,  # NVRTC 13.0 takes lambdas for host functions
}
MOST_THREADS = 8  # a compilation of our kernels takes 100 to 300 MB
UNKNOWN = -1  # what the log does not say: not 0, which would mean "no spills"


# cuda.core replaces itself while it is imported, and another thread would see it half-made.
_importing = threading.Lock()


@dataclass(frozen=True)
class Program:
    source: Path
    name: str  # a name expression: billfish::w4a16_decode<billfish::Half, 128, false, 16>


@dataclass(frozen=True)
class Cubin:
    code: bytes
    symbol: str  # the lowered name
    registers: int
    spill_bytes: int  # stores and loads
    stack_bytes: int
    smem_bytes: int  # static
    log: str


class CompileError(UserError):
    """NVRTC refuses a program; the message holds its log."""


def build(program: Program, arch: str) -> Cubin:
    """From the cache, or compiled and cached."""
    key = _key(program, arch)
    return _cached(key) or _compile_and_cache(program, arch, key)


def build_all(
    programs: Sequence[Program], arch: str, say: Callable[[str], None] | None = None
) -> list[Cubin]:
    """All of them in order; those that are not cached are compiled in parallel.

    NVRTC 13.4 holds neither Python's lock nor one of its own: at best six kernels took 6.7 s on two
    threads of two cores and 13.3 s one after the other (7.1 s in two processes); on a busy machine
    the gain went down to none.
    """
    keys = {program: _key(program, arch) for program in programs}
    found = {program: _cached(key) for program, key in keys.items()}
    missing = [program for program, cubin in found.items() if cubin is None]
    if missing:
        tell = say or (lambda message: None)
        tell(f"compiling kernels 0/{len(missing)} for {arch}")
        with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1, MOST_THREADS)) as pool:
            jobs = {
                pool.submit(_compile_and_cache, program, arch, keys[program]): program
                for program in missing
            }
            try:
                for count, job in enumerate(as_completed(jobs), 1):
                    found[jobs[job]] = job.result()
                    tell(f"compiling kernels {count}/{len(missing)} for {arch}")
            except BaseException:  # report the first failure without waiting for the others
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [cubin for program in programs if (cubin := found[program]) is not None]


def is_cached(program: Program, arch: str) -> bool:
    return _cached(_key(program, arch)) is not None


def compile(program: Program, arch: str) -> Cubin:
    """Compiled now, whatever the cache holds."""
    core, _ = _cuda()
    begin, report = time.perf_counter(), io.StringIO()
    options = core.ProgramOptions(
        name=str(program.source),  # messages then show the real file and line
        arch=arch,
        include_path=str(INCLUDE),
        lineinfo=_debug() or None,
        **OPTIONS,
    )
    try:
        text = program.source.read_text(encoding="utf-8")
        made = core.Program(text, "c++", options).compile("cubin", (program.name,), report)
    except Exception as error:  # cuda.core's own type, which holds the log, is not public
        reason = str(error).partition("compilation log:")[2].strip("\0\n ") or str(error)
        raise CompileError(
            f"{program.name} does not compile for {arch} ({program.source}):\n{reason}"
        ) from None
    log, symbol = report.getvalue().strip("\0\n "), made.symbol_mapping[program.name].decode()
    cubin = Cubin(bytes(made.code), symbol, **resources(log, symbol), log=log)
    if _debug():
        seconds = time.perf_counter() - begin
        print(
            f"billfish jit: {program.name} for {arch}, with lineinfo: {seconds:.2f} s, "
            f"{cubin.registers} registers, {cubin.spill_bytes} bytes spilled, "
            f"{cubin.stack_bytes} of stack",
            file=sys.stderr,
        )
    return cubin


def resources(log: str, symbol: str) -> dict[str, int]:
    """What `ptxas -v` reports of one function; the log has a paragraph for each in the source.

    ptxas info : Function properties for SYMBOL
    ptxas      .  0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
    ptxas info : Used 12 registers, used 0 barriers, 1024 bytes smem
    """
    found = dict.fromkeys(("registers", "spill_bytes", "stack_bytes", "smem_bytes"), UNKNOWN)
    mine = False
    for line in log.splitlines():
        if about := re.search(r"Function properties for (\S+)", line):
            mine = about[1].strip("'") == symbol
        elif not mine:
            continue
        elif frame := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            found["stack_bytes"] = int(frame[1])
            found["spill_bytes"] = int(frame[2]) + int(frame[3])
        elif used := re.search(r"Used (\d+) registers", line):
            static = re.search(r"(\d+) bytes smem", line)
            found["registers"] = int(used[1])
            found["smem_bytes"] = int(static[1]) if static else 0
    return found


# -- with the cache


def _key(program: Program, arch: str) -> str:
    settings = (program.name, arch, version(), json.dumps(OPTIONS), f"lineinfo {_debug()}")
    return cache.key_of(program.source, INCLUDE, settings)


def _cached(key: str) -> Cubin | None:
    content = cache.load(key)
    if content is None:
        return None
    head, _, code = content.partition(b"\n")
    return Cubin(code, **json.loads(head))


def _compile_and_cache(program: Program, arch: str, key: str) -> Cubin:
    cubin = compile(program, arch)
    facts = asdict(cubin)
    code = facts.pop("code")
    cache.store(key, json.dumps(facts).encode() + b"\n" + code)
    return cubin


# -- NVRTC


def version() -> str:
    code, major, minor = _cuda()[1].nvrtcVersion()
    return f"{major}.{minor}" if int(code) == 0 else "unknown"


def architectures() -> list[str]:
    """Those that this NVRTC can compile our kernels for: from Ampere on."""
    code, found = _cuda()[1].nvrtcGetSupportedArchs()
    if int(code) != 0:
        raise RuntimeError(f"NVRTC does not list its architectures: {code!r}")
    return [arch_of(*divmod(number, 10)) for number in found if number >= 80]


@once
def _cuda() -> tuple[Any, Any]:
    """cuda.core, and NVRTC itself for what cuda.core does not ask it."""
    try:
        with _importing:
            from cuda import core
            from cuda.bindings import nvrtc

            nvrtc.nvrtcVersion()  # this is what loads the library
    except (ImportError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            "CUDA kernels are compiled by NVRTC when they are first needed, and it is not here "
            f"({reason}). pip install 'billfish[cuda]'"
        ) from None
    return core, nvrtc


def _debug() -> bool:
    return os.environ.get("BILLFISH_JIT_DEBUG", "0") not in ("", "0")
