"""The CPU's loop of error feedback against the same loop in tensor operations."""

import pytest
import torch

from billfish.kernels import feedback
from billfish.kernels.cpu import ISAS, features, isa


def problem(columns, n, levels):
    source = torch.Generator().manual_seed(columns + n)
    block, steps = (torch.randn(columns, n, generator=source) for _ in range(2))
    origins = torch.randint(0, levels, (columns, n), generator=source).float()
    # Errors stay below 9. With 0.2 in 128 columns they grow to 59, and differences in the last bits
    # with them, to 1.7e-5.
    spread = torch.triu(torch.randn(columns, columns, generator=source) / columns**0.5, 1)
    spread += torch.diag(0.5 + torch.rand(columns, generator=source))
    return block, 0.05 + steps.abs(), origins, spread


@pytest.mark.parametrize("name", [name for name, each in ISAS.items() if each.needs <= features()])
@pytest.mark.parametrize(("columns", "n"), [(128, 64), (128, 50), (37, 7), (1, 1)])
@pytest.mark.parametrize("levels", [4, 16, 256])
def test_equals_the_operations_one_by_one(monkeypatch, name, columns, n, levels):
    monkeypatch.setenv("BILLFISH_CPU_ISA", name)
    isa.cache_clear()
    feedback._kernel.cache_clear()
    try:
        block, steps, origins, spread = problem(columns, n, levels)
        expected = feedback.one_by_one(block.clone(), steps, origins, spread, levels)
        got = feedback.round_columns(block.clone(), steps, origins, spread, levels)
    finally:
        isa.cache_clear()
        feedback._kernel.cache_clear()
    # Sums that end next to a half may go either way: fused, they are rounded once less.
    alike = (got[0] == expected[0]).all(dim=0)
    assert alike.float().mean() > 0.9
    torch.testing.assert_close(got[1][:, alike], expected[1][:, alike], rtol=1e-4, atol=1e-5)
    assert got[0].min() >= 0 and got[0].max() <= levels - 1
