"""Lookups in the registry: a scheme by name, its ops, kernels and quantizer."""

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from billfish.errors import UserError
from billfish.kernels import jit
from billfish.kernels.device import gpu
from billfish.kernels.jit import Program
from billfish.schemes import DEFAULT, SCHEMES
from billfish.schemes.base import Family, Fitting, LinearOp, Options, Scheme

HEAD_BITS = (8, 4)


def family(name: str) -> Family:
    if name not in SCHEMES:
        raise UserError(f"scheme {name!r}: known are {', '.join(SCHEMES)}.")
    return SCHEMES[name]


def from_options(name: str, options: Options) -> Scheme | Fitting:
    made: Scheme | Fitting = family(name).scheme.from_options(options)
    return made


def with_options(name: str, **wanted: Any) -> Scheme:
    """A scheme with those parameters in `wanted` that it has: benchmarks sweep over schemes."""
    has = {field.name for field in dataclasses.fields(family(name).scheme)}
    made = from_options(name, {key: value for key, value in wanted.items() if key in has})
    return made.fit([]) if isinstance(made, Fitting) else made


def head_scheme(bits: int, n: int, k: int) -> Scheme:
    """Of a packed head (lm_head), whatever scheme the other linears have: integer groups as large
    as fit, symmetric. Raises a UserError if none fits."""
    if bits not in HEAD_BITS:
        known = " and ".join(map(str, HEAD_BITS))
        raise UserError(f"--head-bits {bits}: known are {known}; without it a head has 16.")
    made = from_options(DEFAULT, {"bits": bits})
    scheme = made.fit([(n, k)]) if isinstance(made, Fitting) else made
    if reason := scheme.refuses(n, k):
        raise UserError(
            f"--head-bits {bits}: the head is {n} x {k}, and no group size fits it ({reason}). "
            "Leave it in 16 bits, without --head-bits."
        )
    return scheme


def fields(scheme: Scheme) -> dict[str, Any]:
    """Name and parameters of a scheme, for reports and configs."""
    return {"name": scheme.name, **dataclasses.asdict(scheme)}  # type: ignore[call-overload]


def from_fields(written: dict[str, Any]) -> Scheme:
    """The inverse; raises a UserError if they do not describe a scheme."""
    parameters = dict(written)
    known = family(str(parameters.pop("name", None))).scheme
    try:
        scheme: Scheme = known(**parameters)
    except TypeError as error:
        raise UserError(f"scheme {known.name}: parameters {parameters} do not fit it.") from error
    for field in dataclasses.fields(known):  # a config may hold anything: "no" is not false
        if type(getattr(scheme, field.name)) is not type(field.default):
            raise UserError(f"scheme {known.name}: parameters {parameters} do not fit it.")
    return scheme


def quantizer(scheme: Scheme) -> Any:
    """The module that quantizes to this scheme; for offline use, as it imports solvers."""
    return importlib.import_module(family(scheme.name).quantizer)


def ops_of(scheme: Scheme) -> tuple[type[LinearOp], ...]:
    """The ops, fastest first; the reference last."""
    return family(scheme.name).ops


def choose_op(
    scheme: Scheme,
    n: int,
    k: int,
    device: torch.device,
    op: str = "auto",
    batch_invariant: bool = False,
) -> type[LinearOp]:
    """The op for one layer; called once when the layer is loaded.

    `auto` takes the first op that does not refuse. It never takes the reference, so that no layer
    silently runs slowly, nor an op that is `by_name` (LinearOp).
    """
    ops = ops_of(scheme)
    if op != "auto":
        named = {candidate.name: candidate for candidate in ops}
        if op not in named:
            raise UserError(
                f"op {op!r} of scheme {scheme.name}: known are auto, {', '.join(named)}."
            )
        if batch_invariant and not named[op].batch_invariant:
            raise UserError(f"op {op!r} is not batch invariant: ask for one of the two.")
        reason = named[op].refuses(scheme, n, k, device)
        if reason:
            raise UserError(f"op {op!r} cannot run a {n} x {k} layer on {device}: {reason}")
        return named[op]
    refusals = []
    for candidate in ops[:-1]:
        reason = candidate.refuses(scheme, n, k, device)
        if batch_invariant and not candidate.batch_invariant:
            reason = "is not batch invariant."
        elif candidate.by_name:
            reason = reason or f'runs only by name, op="{candidate.name}".'
        if reason is None:
            return candidate
        refusals.append(f"  {candidate.name}: {reason}")
    kind = "batch invariant" if batch_invariant else "fast"
    raise UserError(
        f"no {kind} op of scheme {scheme.name} runs a {n} x {k} layer on {device}:\n"
        + "\n".join(refusals)
        + f'\nop="{ops[-1].name}" runs it anywhere, slowly.'
    )


def programs(
    schemes: Iterable[Scheme], dtype: torch.dtype, arch: str, experts: Iterable[Scheme] = ()
) -> list[Program]:
    """All CUDA kernels that layers of these schemes in a model of `dtype` may need on `arch`, and
    layers of experts of those in `experts`."""
    wanted = [
        p for scheme in schemes for op in ops_of(scheme) for p in op.programs(scheme, dtype, arch)
    ]
    wanted += [p for s in experts for op in ops_of(s) for p in op.stack_programs(s, dtype, arch)]
    return list(dict.fromkeys(wanted))


def compile_kernels(
    schemes: Iterable[Scheme],
    dtype: torch.dtype,
    device: torch.device,
    say: Callable[[str], None] | None = None,
) -> None:
    """Compile, in parallel, the kernels that layers of these schemes will need and that are not
    cached."""
    if device.type == "cuda":
        arch = gpu(device).arch
        jit.build_all(programs(schemes, dtype, arch), arch, say)
