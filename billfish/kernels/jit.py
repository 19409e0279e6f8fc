"""NVRTC: one CUDA source and one C++ name -> a cubin, with what ptxas says of it.

Straight to machine code of one architecture; there is no PTX step and no CUDA toolkit, and a GPU
is not needed. Sources include "billfish/*.cuh" alone: no CUDA headers, which cost seconds a kernel.
A failure shows the compiler's log with the source's own file and line. BILLFISH_JIT_DEBUG=1 adds
line numbers for profilers and says on stderr what compiles and how long it takes.
"""

import json
import os
import re
import sys
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
OPTIONS = ("-std=c++17", "--ptxas-options=-v")  # ptxas reports into the program's log
MOST_THREADS = 8  # a compilation of our kernels takes 100 to 300 MB
UNKNOWN = -1  # what the log did not tell: not 0, which tests take for "no spills"


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


def build(program: Program, arch: str, options: Sequence[str] = ()) -> Cubin:
    """From the cache, or compiled and kept."""
    key = _key(program, arch, options)
    return _cached(key) or _compile_and_keep(program, arch, options, key)


def build_all(
    programs: Sequence[Program],
    arch: str,
    say: Callable[[str], None] | None = None,
    options: Sequence[str] = (),
) -> list[Cubin]:
    """All of them in order; those that are not cached are compiled side by side.

    NVRTC 13.4 holds neither Python's lock nor one of its own: at best six kernels took 6.7 s on two
    threads of two cores and 13.3 s one after the other (7.1 s in two processes); on a busy machine
    the gain went down to none.
    """
    keys = {program: _key(program, arch, options) for program in programs}
    found = {program: _cached(key) for program, key in keys.items()}
    missing = [program for program, cubin in found.items() if cubin is None]
    if missing:
        tell = say or (lambda message: None)
        tell(f"compiling kernels 0/{len(missing)} for {arch}")
        with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1, MOST_THREADS)) as pool:
            jobs = {
                pool.submit(_compile_and_keep, program, arch, options, keys[program]): program
                for program in missing
            }
            try:
                for count, job in enumerate(as_completed(jobs), 1):
                    found[jobs[job]] = job.result()
                    tell(f"compiling kernels {count}/{len(missing)} for {arch}")
            except BaseException:  # the first failure is told, not waited for
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [cubin for program in programs if (cubin := found[program]) is not None]


def is_cached(program: Program, arch: str, options: Sequence[str] = ()) -> bool:
    return _cached(_key(program, arch, options)) is not None


def compile(program: Program, arch: str, options: Sequence[str] = ()) -> Cubin:
    """Compiled now, whatever the cache holds."""
    nvrtc = _nvrtc()
    flags = [f"-arch={arch}", *_options(options), f"-I{INCLUDE}"]
    begin = time.perf_counter()
    # The source's path is the program's name: messages then carry the real file and line.
    text, path = program.source.read_bytes(), os.fsencode(program.source)
    handle = _checked(nvrtc, nvrtc.nvrtcCreateProgram(text, path, 0, [], []))
    try:
        name = program.name.encode()
        _checked(nvrtc, nvrtc.nvrtcAddNameExpression(handle, name))
        arguments = [flag.encode() for flag in flags]
        (code,) = nvrtc.nvrtcCompileProgram(handle, len(arguments), arguments)
        log = _read(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, handle)
        told = log.rstrip(b"\0").decode(errors="replace").strip()
        if int(code) != 0:
            reason = told or _text(nvrtc, code)
            raise CompileError(
                f"{program.name} does not compile for {arch} ({program.source}):\n{reason}"
            )
        symbol = _checked(nvrtc, nvrtc.nvrtcGetLoweredName(handle, name)).decode()
        machine = _read(nvrtc, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, handle)
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
    cubin = Cubin(machine, symbol, **resources(told, symbol), log=told)
    if _debug():
        seconds = time.perf_counter() - begin
        print(
            f"billfish jit: {program.name} {' '.join(flags)}: {seconds:.2f} s, {cubin.registers} "
            f"registers, {cubin.spill_bytes} bytes spilled, {cubin.stack_bytes} of stack",
            file=sys.stderr,
        )
    return cubin


def resources(log: str, symbol: str) -> dict[str, int]:
    """What `ptxas -v` says of one function; the log has a paragraph for each that is in a source.

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


def _key(program: Program, arch: str, options: Sequence[str]) -> str:
    settings = (program.name, arch, version(), *_options(options))
    return cache.key_of(program.source, INCLUDE, settings)


def _cached(key: str) -> Cubin | None:
    content = cache.load(key)
    if content is None:
        return None
    head, _, code = content.partition(b"\n")
    return Cubin(code, **json.loads(head))


def _compile_and_keep(program: Program, arch: str, options: Sequence[str], key: str) -> Cubin:
    cubin = compile(program, arch, options)
    facts = asdict(cubin)
    code = facts.pop("code")
    cache.store(key, json.dumps(facts).encode() + b"\n" + code)
    return cubin


# -- NVRTC


def version() -> str:
    nvrtc = _nvrtc()
    code, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}" if int(code) == 0 else "unknown"


def architectures() -> list[str]:
    """For which this NVRTC and our kernels can be compiled: from Ampere on."""
    nvrtc = _nvrtc()
    found = _checked(nvrtc, nvrtc.nvrtcGetSupportedArchs())
    return [arch_of(*divmod(number, 10)) for number in found if number >= 80]


@once
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # this is what loads the library
    except (ImportError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            "CUDA kernels are compiled by NVRTC when they are first needed, and it is not here "
            f"({reason}). pip install 'billfish[cuda]'"
        ) from None
    return nvrtc


def _options(extra: Sequence[str]) -> tuple[str, ...]:
    return (*OPTIONS, *(("-lineinfo",) if _debug() else ()), *extra)


def _debug() -> bool:
    return os.environ.get("BILLFISH_JIT_DEBUG", "0") not in ("", "0")


def _checked(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    """The value of a call that can only fail by our own mistake."""
    code, *values = answer
    if int(code) != 0:
        raise RuntimeError(f"NVRTC: {_text(nvrtc, code)}")
    return values[0] if values else None


def _text(nvrtc: Any, code: Any) -> str:
    _, text = nvrtc.nvrtcGetErrorString(code)
    return text.decode() if isinstance(text, bytes) else str(text)


def _read(nvrtc: Any, size_of: Any, read: Any, handle: Any) -> bytes:
    size: int = _checked(nvrtc, size_of(handle))
    if size <= 1:  # only the zero at the end; and Python shares one-byte objects, which this writes
        return b""
    buffer = bytes(size)
    _checked(nvrtc, read(handle, buffer))
    return buffer
