"""QuantLinear with every scheme (cases from every.py)."""

import copy

import pytest
import torch
from every import every_layer, same, scales_of, seeded, stored

from billfish.models.linear import QuantLinear
from billfish.schemes.registry import choose_op
from billfish.schemes.w4a16 import W4A16


def layer_of(scheme, n, k, bias=False, dtype=torch.bfloat16):
    layer = QuantLinear(scheme, n, k, bias=bias, dtype=dtype)
    layer.set_tensors(stored(scheme, n, k, dtype))
    if bias:
        layer.bias.data = torch.randn(n, generator=seeded(n, n)).to(dtype)
    return layer


def some_x(k, dtype=torch.bfloat16):
    return torch.randn(5, k, generator=seeded(5, k)).to(dtype)


@every_layer
def test_linear_is_born_with_the_schemes_tensors(scheme, n, k):
    layer = QuantLinear(scheme, n, k, bias=True, dtype=torch.float16, device="meta")
    specs = scheme.tensors(n, k, torch.float16)
    assert layer.state_dict().keys() == {*specs, "bias"}
    for name, spec in specs.items():
        assert spec.mismatch(layer.get_buffer(name)) is None
    assert tuple(layer.bias.shape) == (n,) and layer.bias.dtype == torch.float16
    assert layer.nbytes() == sum(spec.nbytes for spec in specs.values())
    assert "not arranged" in repr(layer)
    assert QuantLinear(scheme, n, k).bias is None


@every_layer
def test_linear_state_dict_is_canonical_whatever_happened(scheme, n, k):
    tensors, layer = stored(scheme, n, k), layer_of(scheme, n, k, bias=True)
    expected = {**tensors, "bias": layer.bias.data}
    same(layer.state_dict(), expected)
    for op in ("auto", "reference", "auto", "auto"):  # arranged twice and back
        layer.arrange(op)
        assert all(getattr(layer, name) is None for name in tensors)  # kept once, by the op
        assert layer.nbytes() == layer.op.nbytes()
        same(layer.state_dict(), expected)
        same(layer.tensors(), tensors)
        assert torch.equal(layer.weight, scheme.dequantize(tensors))


@every_layer
def test_linear_loads_a_state_dict(scheme, n, k):
    source = layer_of(scheme, n, k, bias=True)
    source.arrange()
    fresh = QuantLinear(scheme, n, k, bias=True)
    assert fresh.load_state_dict(source.state_dict()).missing_keys == []
    assert torch.equal(fresh(some_x(k)), source(some_x(k)))
    # Over an arranged layer with other numbers: the old ones must be gone.
    other = layer_of(scheme, n, k, bias=True)
    scales = scales_of(other.tensors())
    changed = {**other.tensors(), scales: other.tensors()[scales] * 2}
    other.set_tensors(changed)
    other.arrange()
    assert not torch.equal(other(some_x(k)), source(some_x(k)))
    other.load_state_dict(source.state_dict())
    assert torch.equal(other(some_x(k)), source(some_x(k)))
    broken = source.state_dict()
    del broken[scales]
    with pytest.raises(RuntimeError, match=scales):
        other.load_state_dict(broken)
    same(source.state_dict(), other.state_dict())


@every_layer
def test_linear_forward_and_set_tensors(scheme, n, k):
    layer, x = layer_of(scheme, n, k, bias=True), some_x(k)
    op = choose_op(scheme, n, k, torch.device("cpu"))
    y = layer(x)  # arranges by itself
    assert layer.op.name == op.name and op.name in repr(layer)
    assert torch.equal(y, op(scheme, stored(scheme, n, k))(x, layer.bias))
    tensors = stored(scheme, n, k)
    scales = scales_of(tensors)
    tensors[scales] = tensors[scales] * 4
    layer.set_tensors(tensors)
    assert layer.op is None
    assert torch.equal(layer(x), op(scheme, tensors)(x, layer.bias))
    with pytest.raises(KeyError, match=scales):
        layer.set_tensors({name: tensors[name] for name in tensors if name != scales})


@every_layer
def test_linear_to_float32_keeps_the_numbers(scheme, n, k):
    for op in ("auto", "reference"):
        layer = layer_of(scheme, n, k, bias=True)
        weight = layer.weight
        layer.arrange(op)
        name = layer.op.name
        assert layer.to(torch.float32) is layer
        assert layer.op.name == name and layer.bias.dtype == torch.float32
        kept = {t.dtype for t in layer.tensors().values() if t.is_floating_point()}
        assert kept == {torch.float32}
        assert torch.equal(layer.weight, weight)
        x = some_x(k, torch.float32)
        exact = scheme.reference(layer.tensors(), x) + layer.bias.double()
        lost = 2**-15 * x.abs().amax() * weight.abs().sum(1).max()  # of x in 16 bits
        assert torch.allclose(layer(x).double(), exact, rtol=1e-5, atol=float(lost))


@every_layer
def test_linear_deepcopy_is_independent(scheme, n, k):
    layer, x = layer_of(scheme, n, k), some_x(k)
    layer.arrange()
    y = layer(x)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), y)
    scales = scales_of(twin.tensors())
    changed = {**twin.tensors(), scales: twin.tensors()[scales] * 2}
    twin.set_tensors(changed)
    assert not torch.equal(twin(x), y)
    assert torch.equal(layer(x), y)


def test_linear_inside_a_model_speaks_by_name():
    model = torch.nn.Sequential(layer_of(W4A16(4, 32), 64, 96), layer_of(W4A16(8, 32), 24, 64))
    names = {f"{i}.{part}" for i in (0, 1) for part in W4A16().tensors(1, 128, torch.float16)}
    assert model.state_dict().keys() == names
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(some_x(96))
    same(model.state_dict(), before)
    assert not list(model.parameters())  # nothing to train by accident
