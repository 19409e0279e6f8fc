"""Attention sinks (gpt-oss): each query head has a learned score that joins every softmax and adds
no value, so that a head may attend to nothing.

No operator of torch takes such scores. Here a key is added to the others whose product with every
query is the head's score, and whose value is 0: heads get one more dimension, in which this key is
1, all other keys are 0, and queries hold their head's score.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

MORE = 8  # dimensions: torch's kernels take heads of multiples of 8


def masked_attention(
    q: Tensor,  # (a, b, rows, head_dim)
    keys: Tensor,  # (a, b, tokens, head_dim)
    values: Tensor,  # the same
    mask: Tensor,  # (..., rows, tokens): bool, or fp32 to add to scores
    scale: float,
    sinks: Tensor | None,  # of each query: like q without its last dimension, or broadcast to it
) -> Tensor:  # like q
    """Softmax attention over the keys that the mask lets pass, and the sinks."""
    if sinks is None:
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    size = q.shape[-1]
    scores = (sinks / scale).expand(q.shape[:-1])[..., None]
    widened = pad(torch.cat((q, scores), -1), (0, MORE - 1))
    keys, values = (pad(x, (0, MORE, 0, 1)) for x in (keys, values))
    keys[..., -1, size] = 1
    seen = True if mask.dtype == torch.bool else 0.0
    out = scaled_dot_product_attention(
        widened, keys, values, attn_mask=pad(mask, (0, 1), value=seen), scale=scale
    )
    return out[..., :size]
