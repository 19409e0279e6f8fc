"""CPU kernels: Python functions that emit LLVM IR, compiled when they are first needed.

llvmlite is to the CPU what NVRTC is to the GPU: a package, no compiler on the machine, and machine
code for exactly this CPU. A `Writer` emits one function. Its `Value`s are scalars or vectors with
the operators + - * / & << >>; `loop` and `when` are context managers, and LLVM keeps a `Variable`
in a register.

    total = w.variable(w.constant(F32, 0.0))
    with w.loop(w.number(0), count) as i:
        total.set(total.get() + w.load(x + i * 4, F32))
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import torch
from llvmlite import ir

from billfish.kernels.cpu import Isa, features, openmp

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
_POINTER = ir.PointerType()
_TYPES = {torch.float32: F32, torch.float16: F16, torch.bfloat16: I16}


def vector(element: Any, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


class Value:
    """A scalar or a vector, in SSA form."""

    def __init__(self, writer: "Writer", raw: Any) -> None:
        self.writer, self.raw, self.type = writer, raw, raw.type
        self.lanes = raw.type.count if isinstance(raw.type, ir.VectorType) else 0
        self.element = raw.type.element if self.lanes else raw.type

    def _with(self, name: str, other: "Value | float") -> "Value":
        value = other if isinstance(other, Value) else self.writer.constant(self.type, other)
        return Value(self.writer, getattr(self.writer.builder, name)(self.raw, value.raw))

    @property
    def whole(self) -> bool:
        return isinstance(self.element, ir.IntType)

    def __add__(self, other: "Value | float") -> "Value":
        return self._with("add" if self.whole else "fadd", other)

    def __sub__(self, other: "Value | float") -> "Value":
        return self._with("sub" if self.whole else "fsub", other)

    def __mul__(self, other: "Value | float") -> "Value":
        return self._with("mul" if self.whole else "fmul", other)

    def __truediv__(self, other: "Value | float") -> "Value":  # of floats
        return self._with("fdiv", other)

    def __floordiv__(self, other: "Value | int") -> "Value":  # of unsigned integers
        return self._with("udiv", other)

    def __and__(self, other: "Value | int") -> "Value":
        return self._with("and_", other)

    def __lshift__(self, bits: int) -> "Value":
        return self._with("shl", bits)

    def __rshift__(self, bits: "Value | int") -> "Value":  # zeros come in
        return self._with("lshr", bits)

    def halved(self, times: int) -> "Value":  # >> of a signed integer
        return self._with("ashr", times)

    def as_bits(self, type_: Any) -> "Value":
        return Value(self.writer, self.writer.builder.bitcast(self.raw, type_))

    def to(self, element: Any, signed: bool = True) -> "Value":
        """The same numbers in another type; integers that do not fit lose their high bits."""
        wanted = isinstance(element, ir.IntType)
        if self.whole and wanted:
            wider = element.width > self.element.width
            name = ("sext" if signed else "zext") if wider else "trunc"
        elif self.whole != wanted:
            name = "sitofp" if self.whole else "fptosi"
        else:
            name = "fpext" if element == F32 else "fptrunc"
        target = vector(element, self.lanes) if self.lanes else element
        return Value(self.writer, getattr(self.writer.builder, name)(self.raw, target))


class Variable:
    def __init__(self, writer: "Writer", first: Value) -> None:
        self.writer, self.type = writer, first.type
        with writer.builder.goto_entry_block():
            self.place = writer.builder.alloca(first.type)
        self.set(first)

    def get(self) -> Value:
        return Value(self.writer, self.writer.builder.load(self.place, typ=self.type))

    def set(self, value: Value) -> None:
        self.writer.builder.store(value.raw, self.place)


class Writer:
    """One function, whose arguments are 64-bit integers: addresses and counts. With `inline` off
    it is compiled once, however many functions call it."""

    def __init__(self, module: ir.Module, name: str, arguments: int, inline: bool = True) -> None:
        kind = ir.FunctionType(ir.VoidType(), [I64] * arguments)
        self.module, self.function = module, ir.Function(module, kind, name)
        if not inline:
            self.function.attributes.add("noinline")
        entry, body = (self.function.append_basic_block(block) for block in ("entry", "body"))
        ir.IRBuilder(entry).branch(body)  # before all loops: variables are allocated there
        self.builder = ir.IRBuilder(body)
        self.arguments = [Value(self, argument) for argument in self.function.args]

    def end(self) -> Any:
        self.builder.ret_void()
        return self.function

    def constant(self, type_: Any, value: float) -> Value:
        many = isinstance(type_, ir.VectorType)
        return Value(self, ir.Constant(type_, [value] * type_.count if many else value))

    def number(self, value: int) -> Value:
        return self.constant(I64, value)

    def lanes(self, element: Any, values: Sequence[float]) -> Value:
        """A vector of these numbers."""
        return Value(self, ir.Constant(vector(element, len(values)), list(values)))

    def array(self, name: str, element: Any, values: Sequence[float]) -> Value:
        """The address of these numbers, which lie beside the code."""
        place = self.module.globals.get(name)
        if place is None:
            kind = ir.ArrayType(element, len(values))
            place = ir.GlobalVariable(self.module, kind, name)
            place.initializer, place.global_constant = ir.Constant(kind, list(values)), True
        return Value(self, self.builder.ptrtoint(place, I64))

    def shuffle(self, value: Value, order: Sequence[int]) -> Value:
        """Lane i of the result is lane order[i]."""
        mask = ir.Constant(vector(I32, len(order)), list(order))
        return Value(self, self.builder.shuffle_vector(value.raw, value.raw, mask))

    def spread(self, value: Value, lanes: int, lane: int = 0) -> Value:
        """A scalar, or one lane of a vector, broadcast to all lanes."""
        raw = value.raw
        if not value.lanes:
            empty = ir.Constant(vector(value.type, lanes), ir.Undefined)
            raw = self.builder.insert_element(empty, raw, ir.Constant(I32, 0))
        return self.shuffle(Value(self, raw), [lane] * lanes)

    def summed(self, value: Value) -> Value:
        """The sum of all lanes, by halving."""
        while value.lanes > 1:
            half = value.lanes // 2
            value = self.shuffle(value, range(half)) + self.shuffle(value, range(half, value.lanes))
        return Value(self, self.builder.extract_element(value.raw, ir.Constant(I32, 0)))

    def variable(self, first: Value) -> Variable:
        return Variable(self, first)

    def pointer(self, address: Value) -> Value:
        return Value(self, self.builder.inttoptr(address.raw, _POINTER))

    def load(self, address: Value, type_: Any) -> Value:
        place = self.pointer(address).raw
        return Value(self, self.builder.load(place, typ=type_, align=1))

    def store(self, value: Value, address: Value) -> None:
        self.builder.store(value.raw, self.pointer(address).raw, align=1)

    def prefetch(self, address: Value) -> None:
        """The address need not be mapped."""
        flags = [self.constant(I32, each) for each in (0, 3, 1)]  # to read, to keep, data
        self.intrinsic("llvm.prefetch.p0", ir.VoidType(), self.pointer(address), *flags)

    def intrinsic(self, name: str, result: Any, *values: Value) -> Value:
        kind = ir.FunctionType(result, [value.type for value in values])
        known = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        return Value(self, self.builder.call(known, [value.raw for value in values]))

    def call(self, function: Any, *values: Value) -> None:
        self.builder.call(function, [value.raw for value in values])

    def call_at(self, address: int, result: Any, *values: Any) -> Any:
        """A C function of this process, by its address."""
        kind = ir.FunctionType(result, [value.type for value in values])
        place = self.builder.inttoptr(ir.Constant(I64, address), kind.as_pointer())
        return self.builder.call(place, values)

    def less(self, a: Value, b: Value | int) -> Value:  # of unsigned integers
        b = b if isinstance(b, Value) else self.constant(a.type, b)
        return Value(self, self.builder.icmp_unsigned("<", a.raw, b.raw))

    def pick(self, condition: Value, yes: Value, no: Value) -> Value:
        return Value(self, self.builder.select(condition.raw, yes.raw, no.raw))

    @contextmanager
    def loop(self, start: Value, end: Value, step: int = 1) -> Iterator[Value]:
        """i = start, start + step and so on while i + step <= end."""
        i = self.variable(start)
        head, body, after = (self.function.append_basic_block(n) for n in ("head", "body", "after"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        now = i.get()
        self.builder.cbranch(self.less(end, now + step).raw, after, body)
        self.builder.position_at_end(body)
        yield now
        i.set(now + step)
        self.builder.branch(head)
        self.builder.position_at_end(after)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.builder.if_then(condition.raw):
            yield


def load_floats(w: Writer, address: Value, dtype: torch.dtype, lanes: int) -> Value:
    """Numbers of any 16- or 32-bit type, as fp32 (exact)."""
    raw = w.load(address, vector(_TYPES[dtype], lanes))
    if dtype == torch.bfloat16:
        return (raw.to(I32, signed=False) << 16).as_bits(vector(F32, lanes))
    return raw if dtype == torch.float32 else raw.to(F32)


# -- dot products of bytes: each int32 lane += four products of a code and a signed byte


def _dot_vnni(w: Writer, total: Value, codes: Value, x: Value) -> Value:
    # LLVM 22 has bytes in its signature, earlier ones (llvmlite below 0.50) 32-bit lanes.
    kind = vector(I8, 4 * total.lanes) if llvm.llvm_version_info[0] >= 22 else total.type
    name = f"llvm.x86.avx512.vpdpbusd.{32 * total.lanes}"
    return w.intrinsic(name, total.type, total, codes.as_bits(kind), x.as_bits(kind))


def _dot_pairs(w: Writer, total: Value, codes: Value, x: Value) -> Value:
    """Two products are added in 16 bits, where 2 * 127 * 128 fits."""
    first, second = {
        8: ("avx2.pmadd.ub.sw", "avx2.pmadd.wd"),
        16: ("avx512.pmaddubs.w.512", "avx512.pmaddw.d.512"),
    }[total.lanes]
    bytes_, pairs = vector(I8, 4 * total.lanes), vector(I16, 2 * total.lanes)
    two = w.intrinsic(f"llvm.x86.{first}", pairs, codes.as_bits(bytes_), x.as_bits(bytes_))
    return total + w.intrinsic(f"llvm.x86.{second}", total.type, two, w.constant(pairs, 1))


def _dot_neon(w: Writer, total: Value, codes: Value, x: Value) -> Value:
    bytes_ = vector(I8, 16)
    name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
    return w.intrinsic(name, total.type, total, codes.as_bits(bytes_), x.as_bits(bytes_))


def _dot_plain(w: Writer, total: Value, codes: Value, x: Value) -> Value:
    for byte in range(4):
        code = (codes >> (8 * byte)) & 255
        total = total + code * (x << (24 - 8 * byte)).halved(24)
    return total


_DOTS = {"vnni": _dot_vnni, "pairs": _dot_pairs, "neon": _dot_neon, "plain": _dot_plain}


def dot(isa: Isa, w: Writer, total: Value, codes: Value, x: Value) -> Value:
    """Codes are below 128."""
    return _DOTS[isa.dot](w, total, codes, x)


def dot_pairs(isa: Isa, w: Writer, total: Value, a: Value, b: Value) -> Value:
    """Each int32 lane += two products of 16-bit integers; for x86."""
    name = {8: "avx2.pmadd.wd", 16: "avx512.pmaddw.d.512"}[isa.lanes]
    pairs = vector(I16, 2 * total.lanes)
    both = a.as_bits(pairs), b.as_bits(pairs)
    return total + w.intrinsic(f"llvm.x86.{name}", total.type, *both)


def spread_words(isa: Isa, w: Writer, address: Value, count: int) -> list[Value]:
    """32-bit words, each broadcast. x86 broadcasts on load; NEON's sdot takes any lane."""
    if isa.dot == "neon":
        words = w.load(address, vector(I32, count))
        return [w.spread(words, isa.lanes, i) for i in range(count)]
    return [w.spread(w.load(address + 4 * i, I32), isa.lanes) for i in range(count)]


# -- threads


class Team:
    """For the function that every thread runs: thread index, thread count and barrier."""

    def __init__(self, w: Writer) -> None:
        self.w, self.known = w, openmp()
        self.index, self.count = w.number(0), w.number(1)
        if self.known:
            index = w.call_at(self.known["omp_get_thread_num"], I32)
            count = w.call_at(self.known["omp_get_num_threads"], I32)
            self.index, self.count = (Value(w, each).to(I64) for each in (index, count))

    def share(self, count: Value) -> tuple[Value, Value]:
        """[first, last): this thread's share of `count` items."""
        return self.index * count // self.count, (self.index + 1) * count // self.count

    def meet(self) -> None:
        if self.known:
            with self.w.when(self.w.less(self.w.number(1), self.count)):
                self.w.call_at(self.known["GOMP_barrier"], ir.VoidType())


def write_start(module: ir.Module, work: Any, arguments: int) -> None:
    """start(arguments..., threads): each thread runs work(address of the arguments)."""
    w = Writer(module, "start", arguments + 1)
    *given, count = w.arguments
    with w.builder.goto_entry_block():
        place = w.builder.alloca(ir.ArrayType(I64, arguments))
    address = Value(w, w.builder.ptrtoint(place, I64))
    for i, each in enumerate(given):
        w.store(each, address + 8 * i)
    known = openmp()
    if known is None:
        w.call(work, address)
    else:
        with w.builder.if_else(w.less(count, 2).raw) as (alone, together):
            with alone:
                w.call(work, address)
            with together:
                function, flags = w.builder.ptrtoint(work, I64), ir.Constant(I32, 0)
                team = (function, address.raw, count.to(I32).raw, flags)
                w.call_at(known["GOMP_parallel"], ir.VoidType(), *team)
    w.end()


# -- machine code


class Compiled:
    """The machine code of a module: its functions by name, and its assembly."""

    def __init__(self, module: ir.Module, triple: str, cpu: str, features: str) -> None:
        machine = llvm.Target.from_triple(triple).create_target_machine(
            cpu=cpu, features=features, opt=3, jit=True
        )
        parsed = llvm.parse_assembly(str(module))
        parsed.verify()
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3))
        passes.getModulePassManager().run(parsed, passes)
        self._machine, self._module = machine, parsed
        self._engine: Any = None

    @property
    def assembly(self) -> str:
        return str(self._machine.emit_assembly(self._module))

    def function(self, name: str, arguments: int) -> Callable[..., None]:
        if self._engine is None:
            self._engine = llvm.create_mcjit_compiler(self._module, self._machine)
            self._engine.finalize_object()
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)
        made: Any = kind(self._engine.get_function_address(name))
        made.code = self  # keeps the machine code alive
        return made  # type: ignore[no-any-return]


def compiled(module: ir.Module, isa: Isa) -> Compiled:
    """For this CPU, without wider vectors than the isa has."""
    _initialize()
    off = [name for name in features() if name.startswith(("avx512", "avx10", "amx"))]
    off = off if isa.lanes < 16 else []
    flags = [f"+{name}" for name in sorted(features() - set(off))] + [f"-{name}" for name in off]
    if "avx2" in features():
        flags.append("+fast-dpwssd")  # one instruction of `dot_pairs` where there is one
    return Compiled(module, llvm.get_process_triple(), llvm.get_host_cpu_name(), ",".join(flags))


@cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
