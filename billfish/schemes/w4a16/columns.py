"""Columns of desc_act checkpoints, in which weight_g_idx assigns each column to a group."""

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.schemes.base import Tensors
from billfish.schemes.w4a16.scheme import W4A16


def by_group(g_idx: Tensor, groups: int, op: str) -> Tensor:
    """The order of columns sorted by group; every call gathers x in this order."""
    sizes = g_idx.bincount(minlength=groups)
    if bool((sizes != len(g_idx) // groups).any()):
        raise UserError(
            f"weight_g_idx has groups of {int(sizes.min())} to {int(sizes.max())} columns; "
            f'op "{op}" runs groups of one size. op="reference" runs any, slowly.'
        )
    return torch.argsort(g_idx, stable=True)


def check_groups(scheme: W4A16, stored: Tensors, part: str, k: int) -> None:
    """Raise unless every group has exactly group_size columns: kernels sort columns by group."""
    g_idx, size = stored[part], scheme.group_of(k)
    groups = k // size
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise UserError(
            f"g_idx goes from {low} to {high}; {groups} groups are numbered from 0.", part
        )
    counts = torch.bincount(g_idx.long(), minlength=groups)
    if int(counts.min()) != size or int(counts.max()) != size:
        raise UserError(
            f"g_idx gives groups {int(counts.min())} to {int(counts.max())} columns; "
            f"each must have {size}.",
            part,
        )
