"""Columns of desc_act checkpoints, where weight_g_idx says which group each belongs to."""

import torch
from torch import Tensor

from billfish.errors import UserError


def by_group(g_idx: Tensor, groups: int, op: str) -> Tensor:
    """The order that puts columns of one group next to each other; x follows by a gather a call."""
    sizes = g_idx.bincount(minlength=groups)
    if bool((sizes != len(g_idx) // groups).any()):
        raise UserError(
            f"weight_g_idx has groups of {int(sizes.min())} to {int(sizes.max())} columns; "
            f'op "{op}" runs groups of one size. op="reference" runs any, slowly.'
        )
    return torch.argsort(g_idx, stable=True)
