"""Quantizes a weight to w4a16_24, given statistics of its inputs: SparseGPT's mask chosen while
GPTQ walks, masks by magnitude or Wanda's score (arXiv 2306.11695) before it, round-to-nearest.

For offline use. A call may take several linears stacked along n that share an input. Rows that are
2:4 already keep their pattern, whatever the mask.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from billfish.schemes.base import Tensors
from billfish.schemes.w4a16_24.codes import Kept, TrainableKept
from billfish.schemes.w4a16_24.pairs import FREE
from billfish.schemes.w4a16_24.scheme import FOUR, KEPT, PAIRS, W4A16Sparse, spread
from billfish.schemes.w4a16_24.walk import Walk, walk_order
from billfish.solvers.known import Known
from billfish.solvers.methods import METHODS
from billfish.solvers.statistics import Statistics, output_energy

# Weights in one walk, which holds several fp32 copies of them.
WALKED = {"cpu": 2**22, "cuda": 2**27}


def quantize(
    scheme: W4A16Sparse,
    weight: Tensor,  # (n, k) fp32
    statistics: Statistics | None,
    method: str,
    dtype: torch.dtype,  # of the stored scales
) -> Kept:
    k = weight.shape[1]
    missing = -k % FOUR
    whole = pad(weight, (0, missing))  # inputs behind k: always 0, with weights of 0
    if statistics is not None and missing:
        statistics = statistics.transformed(lambda rows: pad(rows, (0, missing)))
    size, order = scheme.group_of(k + missing), None
    if statistics is not None:
        order = walk_order(statistics.hessian.diagonal(), size)
    known = Known.of(statistics, METHODS[method], order)
    target = known.target(whole)
    pairs, note = fixed_pairs(scheme.mask, whole, known)
    walk = Walk(known, k + missing, size, weight.device, dtype)
    rows = max(64, WALKED[weight.device.type] // whole.shape[1])
    pieces = [
        walk.run(some, given)
        for some, given in zip(torch.split(target, rows), torch.split(pairs, rows), strict=True)
    ]
    codes, exact, places, scales = (
        torch.cat([getattr(piece, name) for piece in pieces])
        for name in ("codes", "exact", "places", "scales")
    )
    note = "; ".join(each for each in (known.note, note) if each) or None
    byte = torch.uint8
    meant = spread(exact, places, k)
    solved = Kept(None, note, meant, scheme, k, codes.to(byte), places.to(byte), scales.to(dtype))
    if known.hessian is None:
        return solved
    energy = output_energy(weight, solved.decoded, known.hessian[:k, :k])
    return replace(solved, energy=energy)


def fixed_pairs(mask: str, weight: Tensor, known: Known) -> tuple[Tensor, str | None]:
    """(n, f) int64: the pair of each four (an index of PAIRS) where it is known beforehand, else
    FREE; and a note on patterns that are kept."""
    score = weight.abs()
    if known.hessian is not None and mask != "magnitude":
        score = score * known.hessian.diagonal().sqrt()
    pairs = largest_pairs(score)
    sparse = ((weight.view(len(weight), -1, FOUR) != 0).sum(-1) <= KEPT).all(1)  # rows
    if mask == "sparsegpt" and known.factor is not None:
        pairs[~sparse] = FREE
    count = int(sparse.sum())
    if not count:
        return pairs, None
    pairs[sparse] = largest_pairs((weight[sparse] != 0).float())
    of = "" if count == len(weight) else f" in {count} of {len(weight)} rows"
    return pairs, f"is 2:4 already{of}: its pattern is kept"


def largest_pairs(score: Tensor) -> Tensor:
    """(n, f) int64: in each four the pair with the largest sum, the first one of equals."""
    fours = score.view(len(score), -1, FOUR)
    kept = torch.tensor(PAIRS, device=score.device)
    best: Tensor = fours[..., kept].sum(-1).argmax(-1)
    return best


def trainable_scales(scheme: W4A16Sparse, tensors: Tensors) -> TrainableKept:
    """Canonical tensors whose scales can be trained; codes and places stay as they are."""
    codes, places = scheme.kept(tensors)
    k, scales = scheme.size(tensors)[1], tensors["weight_scale"]
    return TrainableKept(Kept(None, None, None, scheme, k, codes, places, scales), None)
