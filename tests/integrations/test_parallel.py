"""Layers of other engines: slices of packed linears on each rank, side by side in one product."""

import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from billfish.checkpoints.own import Own
from billfish.errors import UserError
from billfish.integrations.parallel import Layer, Slices, Stored
from billfish.schemes.registry import with_options

CPU, DTYPE, RANKS = torch.device("cpu"), torch.bfloat16, 2
K, SIZES = 1024, (1024, 256, 256)  # of q, k and v; w2416 splits 1024 inputs, at least
SCHEMES = [
    with_options("w4a16", group_size=64, symmetric=False),
    with_options("w2416"),
    with_options("w4ax", group_size=64),
    with_options("w4a16_24", group_size=64),
]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


def tensors_of(scheme, n, k, seed=0):
    return scheme.random_tensors(n, k, DTYPE, torch.Generator().manual_seed(seed))


def stored(scheme, slices, name="q_proj"):
    return Stored(f"model.layers.0.{name}", Own(scheme, {}), scheme, slices, DTYPE)


def filled(linears, tensors):
    layer = Layer(linears)
    for index, given in enumerate(tensors):
        for name in sorted(given, reverse=True):  # the order of arrival does not matter
            layer.take(index, name, given[name])
    return layer


def weights(scheme, layer):
    """The decoded weight of this rank."""
    return torch.cat([scheme.dequantize(cut) for one in layer.linears for cut in one.finish()])


def test_slices_of_fused_outputs():
    """q, k and v on disk as one linear: 8 heads, 2 kv heads, 4 ranks, so two share a kv head."""
    found = Slices.of_outputs(64, (32, 16, 16), (1, 2, 2), rank=3, ranks=4)
    assert found == Slices(128 + 32 + 32, 64, ((96, 128), (144, 160), (176, 192)), (0, 64), 4)
    assert Slices.of_outputs(64, (32, 16, 16), (1, 1, 1), 0, 1).rows == ((0, 64),)


@every_scheme
def test_ranks_have_the_rows_of_their_parts(scheme):
    """Merged from three linears or stored as one: the same weights on each rank."""
    many = [tensors_of(scheme, n, K, seed=0) for n in SIZES]
    whole = [scheme.dequantize(tensors) for tensors in many]
    fused = tensors_of(scheme, sum(SIZES), K)
    fused_weight = scheme.dequantize(fused).split(SIZES)
    for rank in range(RANKS):
        halves = [n // RANKS for n in SIZES]
        parts = [Slices.of_outputs(K, (half,), (1,), rank, RANKS) for half in halves]
        layer = filled([stored(scheme, part) for part in parts], many)
        wanted = [each.chunk(RANKS)[rank] for each in whole]
        assert torch.equal(weights(scheme, layer), torch.cat(wanted))
        one = Slices.of_outputs(K, halves, (1, 1, 1), rank, RANKS)
        layer = filled([stored(scheme, one)], [fused])
        assert all(not linear.waiting for linear in layer.linears), "whole tensors are kept"
        wanted = [each.chunk(RANKS)[rank] for each in fused_weight]
        assert torch.equal(weights(scheme, layer), torch.cat(wanted))


@every_scheme
def test_ranks_have_their_inputs(scheme):
    tensors = tensors_of(scheme, 256, K)
    found = [
        weights(scheme, filled([stored(scheme, Slices.of_inputs(256, K, r, RANKS))], [tensors]))
        for r in range(RANKS)
    ]
    assert torch.equal(torch.cat(found, 1), scheme.dequantize(tensors))


@every_scheme
def test_the_product_is_the_linears_side_by_side(scheme):
    many = [tensors_of(scheme, n, K, seed=0) for n in SIZES]
    slices = [Slices.of_outputs(K, (n,), (1,), 0, 1) for n in SIZES]
    product = filled([stored(scheme, each) for each in slices], many).product(CPU)
    assert len(product.ops) == 1, "linears of one scheme are joined"
    x, bias = torch.randn(5, K), torch.randn(sum(SIZES))
    wanted = torch.cat([scheme.reference(tensors, x) for tensors in many], 1) + bias
    assert torch.allclose(product(x, bias).double(), wanted, atol=2e-3)


def test_linears_of_different_schemes_stay_apart():
    few, many = SCHEMES[1], SCHEMES[2]
    slices = Slices.of_outputs(K, (256,), (1,), 0, 1)
    given = [tensors_of(few, 256, K), tensors_of(many, 256, K)]
    product = filled([stored(few, slices), stored(many, slices)], given).product(CPU)
    assert len(product.ops) == 2
    x, bias = torch.randn(3, K), torch.randn(512)
    wanted = [few.reference(given[0], x), many.reference(given[1], x)]
    assert torch.allclose(product(x, bias).double(), torch.cat(wanted, 1) + bias, atol=2e-3)


@every_scheme
def test_it_is_traced_once_for_all_batch_sizes(scheme):
    """As vLLM compiles it: whole graphs, any number of tokens."""
    slices = Slices.of_outputs(K, SIZES, (1, 1, 1), 0, 1)
    given = tensors_of(scheme, sum(SIZES), K)
    product = filled([stored(scheme, slices)], [given]).product(CPU)
    counter, bias = CompileCounter(), torch.randn(sum(SIZES))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: product(x, bias) * 2, backend=counter, fullgraph=True)
    for m in (5, 2, 17, 64):
        x = torch.randn(m, K)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), product(x, bias) * 2), m
    assert counter.frame_count == 1


def test_a_cut_is_refused_before_tensors_come():
    with pytest.raises(UserError, match=r"layers.0.o_proj: this 256 x 96 linear cannot be split"):
        stored(SCHEMES[0], Slices.of_inputs(256, 96, 0, 2), "o_proj")


@every_scheme
def test_a_cut_is_rehearsed_without_weights(scheme):
    """Large tensors are on the meta device, as `small_tensors` gives them."""
    small = {
        name: tensor if tensor.ndim == 1 else tensor.to("meta")
        for name, tensor in tensors_of(scheme, 256, K).items()
    }
    for slices in (
        Slices.of_inputs(256, K, 1, RANKS),
        Slices.of_outputs(K, (64, 64), (1, 1), 1, RANKS),
    ):
        stored(scheme, slices).rehearse(small)


def test_an_order_of_inputs_that_crosses_the_cut_is_refused():
    scheme = with_options("w4ax", group_size=64, activations="fmpq")
    small = {
        name: tensor if tensor.ndim == 1 else tensor.to("meta")
        for name, tensor in tensors_of(scheme, 256, K).items()
    }
    linear = stored(scheme, Slices.of_inputs(256, K, 0, RANKS), "o_proj")
    with pytest.raises(
        UserError, match=r"layers.0.o_proj: .* its stored columns there read others"
    ):
        linear.rehearse(small)


def test_what_is_missing_or_foreign_is_named():
    scheme, slices = SCHEMES[3], Slices.of_outputs(K, (256,), (1,), 0, 1)
    given = tensors_of(scheme, 256, K)
    missing = {name: tensor for name, tensor in given.items() if name != "weight_meta"}
    with pytest.raises(UserError, match=r"model.layers.0.q_proj: weight_meta is missing"):
        filled([stored(scheme, slices)], [missing]).product(CPU)
    with pytest.raises(UserError, match=r"model.layers.0.q_proj: weight_packed is missing"):
        Layer([stored(scheme, slices)]).product(CPU)
    with pytest.raises(UserError, match=r"model.layers.0.q_proj: g_idx is unknown"):
        filled([stored(scheme, slices)], [{"g_idx": torch.zeros(1), **missing}]).product(CPU)


def test_importing_it_leaves_llvm_alone():
    """vLLM's CPU worker looks at all loaded modules when it starts, and llvmlite's break it."""
    names = "billfish.integrations.parallel, billfish.models.load"
    code = f"import sys, {names}; sys.exit('llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
