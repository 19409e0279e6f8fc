"""What every scheme stores and what every op of it computes (cases from every.py)."""

import json
import re
from contextlib import suppress

import pytest
import torch
from every import (
    CASES,
    EVERY,
    every_case,
    every_layer,
    every_typed_case,
    same,
    seeded,
    solved,
    stored,
)

from billfish.errors import UserError
from billfish.schemes import SCHEMES
from billfish.schemes.base import bits_per_weight
from billfish.schemes.registry import fields, from_fields, from_options, ops_of
from billfish.schemes.w4ax.scheme import SHARED
from billfish.solvers.methods import METHODS

# --- what is stored ------------------------------------------------------------------------------


def test_every_scheme_has_a_shape_and_its_name():
    assert {scheme for scheme, _, _ in CASES} == set(EVERY)
    for name, family in SCHEMES.items():
        assert family.scheme.name == name and set(family.scheme.methods) <= set(METHODS)
        assert family.scheme.__dataclass_params__.frozen
        names = [op.name for op in family.ops]
        assert len(set(names)) == len(names) and names[-1] == "reference" and "auto" not in names
        with pytest.raises(UserError, match=f"{name} has no colour"):
            from_options(name, {"colour": "blue"})


@pytest.mark.parametrize("scheme", EVERY, ids=str)
def test_a_scheme_is_written_and_read_by_its_fields(scheme):
    assert from_fields(json.loads(json.dumps(fields(scheme)))) == scheme
    with pytest.raises(UserError, match="do not fit"):
        from_fields({**fields(scheme), "colour": "blue"})
    assert scheme.describe() and scheme.name not in scheme.describe()


@every_case
def test_shards_are_the_layer_cut(scheme, n, k):
    """Along n and k, where nothing forbids it; where it does, the sentence is in the error."""
    tensors, weight = stored(scheme, n, k), scheme.dequantize(stored(scheme, n, k))
    for dim, size in ((0, n), (1, k)):
        for at in (size // 2, size // 3 // 16 * 16):
            reason = scheme.refuses_cut(dim, at, size)
            if reason:
                with pytest.raises(UserError, match=re.escape(reason)):
                    scheme.shard(tensors, dim, 0, at)
                continue
            for begin, end in ((0, at), (at, size)) if at else ():
                part = scheme.shard(tensors, dim, begin, end)
                cut = weight[begin:end] if dim == 0 else weight[:, begin:end]
                assert torch.equal(scheme.dequantize(part), cut)
                assert scheme.size(part) == tuple(cut.shape)


@every_typed_case
def test_quantize_yields_exactly_tensors(scheme, n, k, dtype):
    specs, tensors = scheme.tensors(n, k, dtype), stored(scheme, n, k, dtype)
    assert tensors.keys() == specs.keys()
    for name, spec in specs.items():
        assert spec.mismatch(tensors[name]) is None, name
        assert tensors[name].is_contiguous() and spec.nbytes == tensors[name].nbytes
        assert spec.mismatch(spec.empty("meta")) is None
    bits = 8 * sum(tensor.nbytes for tensor in tensors.values()) / (n * k)
    assert bits_per_weight(scheme, n, k, dtype) == bits
    drawn = scheme.random_tensors(n, k, dtype, seeded(n, k))
    assert drawn.keys() == specs.keys() and scheme.size(drawn) == (n, k)
    assert all(spec.mismatch(drawn[name]) is None for name, spec in specs.items())
    assert 0.005 < scheme.dequantize(drawn).std() < 0.08


@every_case
def test_what_the_solver_decoded_is_what_is_stored(scheme, n, k):
    """The next layers are calibrated on `decoded`: it must be the weight that will run."""
    found = solved(scheme, n, k, torch.bfloat16)
    if found.tensors().keys() == scheme.tensors(n, k, torch.bfloat16).keys():
        assert torch.equal(found.decoded, scheme.dequantize(found.tensors()))
        start, end = (3, 17) if scheme.refuses_cut(0, 3, n) is None else (16, 32)
        some = found.rows(start, end)
        assert torch.equal(scheme.dequantize(some.tensors()), found.decoded[start:end])


# --- ops -----------------------------------------------------------------------------------------


def ops_on_cpu(scheme, n, k):
    runs = [op for op in ops_of(scheme) if op.refuses(scheme, n, k, torch.device("cpu")) is None]
    assert runs[-1].name == "reference"
    return runs


@every_typed_case
def test_identity_gives_the_weight_rounded_once(scheme, n, k, dtype):
    tensors = stored(scheme, n, k)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    weight, eye = scheme.dequantize(tensors), torch.eye(k, dtype=dtype)
    exact = scheme.reference(tensors, eye).T
    if getattr(scheme, "a4_share", 0):  # 4-bit activations: a 1 is off by up to a part in 8.5
        assert ((exact - weight).norm() <= 0.15 * weight.norm()).all()
    else:
        # Where activations are rounded, their scale of 1 / 127 is rounded, too.
        assert ((exact - weight).abs() <= 2**-22 * weight.abs()).all()
        assert torch.equal(exact, weight.double()) or scheme.name == "w4ax"
    for op in ops_on_cpu(scheme, n, k):
        ready = op(scheme, tensors)
        for rows in (1, 16, k):  # few rows and many may take another path
            count = min(k, 4 * rows)
            y = torch.cat([ready(x) for x in eye[:count].split(rows)]).T
            assert y.dtype == dtype and tuple(y.shape) == (n, count)
            want = exact[:, :count].to(dtype)
            if op.by_name:  # promises less: KleidiAI adds up all of the row, and subtracts it
                assert ((y.double() - want).abs() <= op.tolerance(scheme, tensors, eye)).all()
                continue
            assert torch.equal(y, want), (op.name, rows)
        same(ready.canonical(), before)
    same(tensors, before)


@every_typed_case
def test_ops_match_the_reference(scheme, n, k, dtype):
    """err(ours, fp64) <= 2 * err(torch in the same dtype, fp64) + what the op says of itself."""
    tensors = stored(scheme, n, k)
    weight = scheme.dequantize(tensors).double()
    for op in ops_on_cpu(scheme, n, k):
        ready = op(scheme, tensors)
        for m in (1, 7, 65):
            x = torch.randn(m, k, generator=seeded(m, k)).to(dtype)
            exact = scheme.reference(tensors, x)
            torch_error = (x @ weight.to(dtype).T - exact).abs().max()
            atol = 1e-6 * exact.abs().max()
            atol += op.tolerance(scheme, tensors, x)
            error = (ready(x).double() - exact).abs().max()
            assert error <= 2 * torch_error + atol, (op.name, m)


@every_case
def test_ops_take_any_leading_shape(scheme, n, k):
    tensors = stored(scheme, n, k)
    x = torch.randn(2, 3, k, generator=seeded(n, k)).bfloat16()
    for op in ops_on_cpu(scheme, n, k):
        ready = op(scheme, tensors)
        y = ready(x)
        assert tuple(y.shape) == (2, 3, n) and y.dtype == x.dtype
        assert torch.equal(y.reshape(6, n), ready(x.reshape(6, k)))
        assert torch.equal(ready(x.transpose(0, 1)), y.transpose(0, 1))  # not contiguous
        assert tuple(ready(x[0, 0]).shape) == (n,)
        assert tuple(ready(x[:, :0]).shape) == (2, 0, n)


@every_case
def test_canonical_survives_calls_and_the_sources_end(scheme, n, k):
    """An op may be asked for its tensors at any time, also when those it was made from are gone."""
    tensors = stored(scheme, n, k)
    for op in ops_on_cpu(scheme, n, k):
        given = {name: tensor.clone() for name, tensor in tensors.items()}
        ready = op(scheme, given)
        ready(torch.randn(2, k).bfloat16())
        del given
        same(ready.canonical(), tensors)
        assert ready.nbytes() >= tensors["weight_packed"].nbytes


# --- joined --------------------------------------------------------------------------------------


def ops_that_arrange(scheme, n, k):
    """Those that run here, and those of a GPU as far as they only arrange."""
    here = ops_on_cpu(scheme, n, k)
    for op in ops_of(scheme):
        if op in here:
            yield op
        elif not op.by_name:
            with suppress(UserError):  # records take groups of 32
                op(scheme, stored(scheme, n, k))
                yield op


def held(op):
    return {**vars(op), **getattr(op, "rest", {})}


@every_layer
def test_joined_ops_are_the_ops_one_after_the_other(scheme, n, k, monkeypatch):
    """The same words once, the same outputs, and each op as it was."""
    for kind in ops_of(scheme):
        if hasattr(kind, "_prepare"):  # it would compile kernels
            monkeypatch.setattr(kind, "_prepare", lambda op: None)
    each = [stored(scheme, rows, k) for rows in (128, 64, 33 if n % 16 else 48)]
    joined = []
    for op in ops_that_arrange(scheme, n, k):
        parts = [op(scheme, tensors) for tensors in each]
        before = sum(part.nbytes() for part in parts)
        whole = op.join(parts)
        if whole is None:
            continue
        joined.append(op.name)
        # an order of inputs that all have is there once (w2416, w4ax)
        columns = getattr(getattr(whole, "packed", None), "columns", None)
        shared = [] if columns is None else [columns]
        inputs = getattr(getattr(whole, "packed", None), "inputs", None) or ()
        shared += [each for each in inputs if isinstance(each, torch.Tensor)]
        shared += [t for name, t in getattr(whole, "rest", {}).items() if name in SHARED]
        if getattr(whole, "blocks", None) is not None:
            shared.append(whole.blocks)
        twice = sum(each.nbytes for each in shared) * (len(parts) - 1)
        assert type(whole) is op and whole.nbytes() == before - twice
        assert sum(part.nbytes() for part in parts) == before
        for part, tensors in zip(parts, each, strict=True):
            same(part.canonical(), tensors)
        storages = {
            name: t.untyped_storage().data_ptr()
            for name, t in held(whole).items()
            if isinstance(t, torch.Tensor)
        }
        for part in parts:
            for name, storage in storages.items():
                assert held(part)[name].untyped_storage().data_ptr() == storage, name
        weights = torch.cat([scheme.dequantize(tensors) for tensors in each])
        assert torch.equal(scheme.dequantize(whole.canonical()), weights)
        if op not in ops_on_cpu(scheme, n, k):
            continue
        for m, dtype in (
            (1, torch.bfloat16),
            (5, torch.bfloat16),
            (40, torch.bfloat16),
            (5, torch.float32),
        ):
            x = torch.randn(m, k, generator=seeded(m, k)).to(dtype)
            alone = [op(scheme, tensors)(x) for tensors in each]
            assert all(map(torch.equal, (part(x) for part in parts), alone))
            assert torch.equal(whole(x), torch.cat(alone, dim=1))
    if scheme.name == "w4a16":
        assert ("cpu" in joined) != getattr(scheme, "has_g_idx", False)
