"""Statistics against a direct computation in fp64 over all tokens of sequences of any length."""

import pytest
import torch

from billfish.solvers.statistics import Statistics, output_energy

K = 12
LENGTHS = (3, 17, 1, 40)


def sequences(dtype=torch.float32, seed=0):
    source = torch.Generator().manual_seed(seed)
    spread = torch.linspace(0.2, 3, K)  # channels of different sizes
    return [(torch.randn(1, n, K, generator=source) * spread).to(dtype) for n in LENGTHS]


def gathered(inputs, originals=None):
    statistics = Statistics(K)
    for x, y in zip(inputs, originals or [None] * len(inputs), strict=True):
        statistics.add(x, y)
    return statistics


def rows(parts):  # (tokens, k) fp64
    return torch.cat([part.reshape(-1, K) for part in parts]).double()


def close(ours, exact):
    assert ours.dtype == torch.float32
    assert torch.allclose(ours.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_means_over_all_tokens(dtype):
    """A long sequence counts for more than a short one: by tokens, not by sequences."""
    inputs = sequences(dtype)
    statistics, x = gathered(inputs), rows(inputs)
    assert statistics.tokens == sum(LENGTHS) == len(x)
    close(statistics.hessian, x.T @ x / len(x))
    close(statistics.magnitude, x.abs().mean(0))
    assert statistics.drift is None
    means = torch.stack([part[0].double().T @ part[0].double() / part.shape[1] for part in inputs])
    assert not torch.allclose(statistics.hessian.double(), means.mean(0), rtol=1e-2)


def test_drift():
    inputs, originals = sequences(), [y * 1.5 + 0.1 for y in sequences(seed=1)]
    statistics = gathered(inputs, originals)
    x, y = rows(inputs), rows(originals)
    close(statistics.drift, (y - x).T @ x / len(x))
    close(statistics.hessian, x.T @ x / len(x))  # the spoiled input alone
    close(gathered(inputs, inputs).drift, torch.zeros(K, K).double())


def test_drift_of_some_sequences():
    """Where there is nothing to compare with (experts), an input counts as not drifted."""
    inputs, originals = sequences(), sequences(seed=1)
    statistics = gathered(inputs, [None, originals[1], None, originals[3]])
    x = rows(inputs)
    y = rows([inputs[0], originals[1], inputs[2], originals[3]])
    close(statistics.drift, (y - x).T @ x / len(x))


def test_shapes_and_order_do_not_matter():
    inputs = sequences()
    one = gathered(inputs)
    flat = gathered([rows(inputs).float()])
    backwards = gathered([part[0] for part in reversed(inputs)])
    for other in (flat, backwards):
        assert other.tokens == one.tokens
        close(other.hessian, one.hessian.double())
        close(other.magnitude, one.magnitude.double())


def test_no_tokens():
    statistics = Statistics(K)
    statistics.add(torch.empty(1, 0, K))
    assert statistics.tokens == 0 and statistics.drift is None
    assert torch.equal(statistics.hessian, torch.zeros(K, K))
    assert torch.equal(statistics.magnitude, torch.zeros(K))


def test_rescale_is_as_if_the_inputs_had_been_scaled():
    inputs, originals = sequences(), sequences(seed=1)
    factor = torch.linspace(0.5, 4, K)
    scaled = gathered([x * factor for x in inputs], [y * factor for y in originals])
    statistics = gathered(inputs, originals)
    statistics.rescale(factor)
    close(statistics.hessian, scaled.hessian.double())
    close(statistics.magnitude, scaled.magnitude.double())
    close(statistics.drift, scaled.drift.double())
    alone = gathered(inputs)
    alone.rescale(factor)
    close(alone.hessian, scaled.hessian.double())


def test_the_inputs_are_left_alone():
    inputs = sequences()
    before = [x.clone() for x in inputs]
    for x in inputs:
        x.requires_grad_()
    statistics = gathered(inputs)
    assert not statistics.hessian.requires_grad
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_output_energy_is_the_mean_squared_output():
    inputs = sequences()
    x, statistics = rows(inputs), gathered(inputs)
    weight = torch.randn(5, K, generator=torch.Generator().manual_seed(2))
    decoded = (weight * 4).round() / 4
    energy = output_energy(weight, decoded, statistics.hessian)
    lost = ((weight - decoded).double() @ x.T).square().mean(1)
    total = (weight.double() @ x.T).square().mean(1)
    assert tuple(energy.shape) == (5, 2)
    assert torch.allclose(energy.double(), torch.stack([lost, total], dim=1), rtol=1e-4)
    assert torch.equal(output_energy(weight, weight, statistics.hessian)[:, 0], torch.zeros(5))


def test_transformed_statistics_are_those_of_transformed_inputs():
    """Hessian and drift of T x, for a T that is neither symmetric nor orthogonal."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64, 12, generator=generator) for _ in range(2))
    turn = torch.randn(12, 12, generator=generator)
    found, wanted = Statistics(12), Statistics(12)
    found.add(x, y)
    wanted.add(x @ turn.T, y @ turn.T)
    made = found.transformed(lambda rows: rows @ turn.T)
    torch.testing.assert_close(made.hessian, wanted.hessian, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made.drift, wanted.drift, rtol=1e-4, atol=1e-4)
    assert made.tokens == 64
