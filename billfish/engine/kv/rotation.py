"""Rotation: the linear transform of K that kv4 codes instead of K, so that 4 bits are enough.

Attention sees K through q k^T alone, and softmax ignores a constant. So for any invertible A

    k' = (k - mean) A      q' = q A^-T      q' k'^T = q k^T - q mean^T, the same for all keys

and A may suit the coding, whose rounding error is as large in every channel of k' and changes a
score by as much as q' is large. A diagonalises the second moments of keys and queries together, to
variances lambda^a and lambda^(1 - a); tokens are weighted by p (1 - p), the change of attention
with a score. A Hadamard matrix then spreads each direction over all channels; the largest one,
scaled up fivefold, falls on the constant vector, which only moves a token's 16-bit `low`. The
rounding error of a block of channels is fed back into the later ones (error feedback, `feedback`).
V is not rotated. docs/LOG.md has the figures.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from billfish.engine.kv.codes import channel_blocks
from billfish.engine.sinks import masked_attention
from billfish.errors import UserError
from billfish.models.decoder import Decoder, Shape, apply_rope

SEQUENCES, TOKENS = 4, 512  # that a model without a stored rotation is run on
QUERIES = 4  # moments are taken of every fourth query
SHIFTS = 64  # positions in a long sequence that the moments are averaged over
BALANCE = 0.35  # a
LARGEST_GAIN = 5.0  # of the direction that falls on `low`
FLOOR = 1e-3  # of the mean variance, added to every variance
FEEDBACK_FLOOR = 5e-2  # the same where the error feedback is solved for

STORED = ("kv_mean", "kv_turn", "kv_carry")
Watch = Callable[[int, Tensor, Tensor], None]  # layer, k, v


@dataclass(frozen=True)
class Rotation:
    mean: Tensor  # (layers, kv_heads, head_dim) fp32
    to_keys: Tensor  # (layers, kv_heads, head_dim, head_dim) fp32: A
    to_queries: Tensor  # A^-T
    feedback: Tensor  # the same shape: rounding error of a channel of k' -> added to later ones

    def keys(self, layer: int, k: Tensor) -> Tensor:  # (tokens, kv_heads, head_dim) -> fp32
        return torch.einsum("thi,hij->thj", k.float() - self.mean[layer], self.to_keys[layer])

    def queries(self, layer: int, q: Tensor) -> Tensor:  # (tokens, heads, head_dim) -> fp32
        tokens, _, size = q.shape
        groups = q.float().reshape(tokens, self.mean.shape[1], -1, size)
        return torch.einsum("thgi,hij->thgj", groups, self.to_queries[layer]).flatten(1, 2)

    def lacking(self, layer: int, q: Tensor) -> Tensor:  # (tokens, heads, head_dim) -> without last
        tokens, _, size = q.shape
        groups = q.float().reshape(tokens, self.mean.shape[1], -1, size)
        return torch.einsum("thgi,hi->thg", groups, self.mean[layer]).flatten(1)

    def to(self, device: torch.device) -> "Rotation":
        return Rotation(*(tensor.to(device) for tensor in vars(self).values()))

    def tensors(self) -> dict[str, Tensor]:
        """As safetensors takes them; to_queries follows from to_keys."""
        kept = (self.mean, self.to_keys, self.feedback)
        return {name: tensor.cpu() for name, tensor in zip(STORED, kept, strict=True)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], shape: Shape) -> "Rotation":
        mean = (shape.layers, shape.kv_heads, shape.head_dim)
        wanted = {name: mean if name == "kv_mean" else (*mean, shape.head_dim) for name in STORED}
        found = {name: tuple(tensors[name].shape) for name in wanted if name in tensors}
        if found != wanted:
            raise UserError(
                f"What kv4 needs of K: found {found}, this model needs {wanted}. Calibrate again "
                "with this model and version: `billfish quantize --kv kv4`, or remove the file, "
                "and kv4 calibrates itself when it is loaded."
            )
        return cls.of(*(tensors[name] for name in wanted))

    @classmethod
    def of(cls, mean: Tensor, keys: Tensor, feedback: Tensor) -> "Rotation":
        queries = torch.linalg.inv(keys.double()).mT
        return cls(mean.float(), keys.float(), queries.float(), feedback.float())


class Moments:
    """Second moments of one layer's keys and queries over the calibration sequences; fp64."""

    def __init__(
        self, shape: Shape, layer: int, device: torch.device, sinks: Tensor | None = None
    ) -> None:
        self.scale, self.heads, self.window = shape.scale, shape.kv_heads, shape.windows[layer]
        self.sinks = None if sinks is None else sinks[..., None]  # (kv_heads, heads of each, 1)
        size = shape.head_dim
        zeros = torch.zeros(self.heads, size + 1, size + 1, dtype=torch.float64, device=device)
        # Of (k, 1): the last row is the sum of k, its corner the sum of weights. The first token
        # apart: it is an attention sink, and stays at position 0 however long the sequence is.
        self.first, self.keys = zeros, zeros.clone()
        self.queries = zeros[:, 1:, 1:].clone()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention among these tokens; adds them to the moments."""
        count = len(q)
        queries = q.float().reshape(count, self.heads, -1, q.shape[-1]).permute(1, 2, 0, 3)
        keys, values = (x.float().transpose(0, 1)[:, None] for x in (k, v))
        here = torch.arange(count, device=q.device)
        seen = here <= here[:, None]
        if self.window is not None:
            seen &= here > here[:, None] - self.window
        shared_k, shared_v = (x.expand(-1, queries.shape[1], -1, -1) for x in (keys, values))
        if (self.window is None or self.window >= count) and self.sinks is None:
            out = scaled_dot_product_attention(  # twice as fast as with a mask
                queries, shared_k, shared_v, is_causal=True, scale=self.scale
            )
        else:
            out = masked_attention(queries, shared_k, shared_v, seen, self.scale, self.sinks)
        # An error of a score changes attention by p (1 - p).
        some = slice(min(count, QUERIES) - 1, None, QUERIES)
        scores = queries[:, :, some] @ keys.mT * self.scale
        scores = scores.masked_fill_(~seen[some], -torch.inf)
        if self.sinks is not None:
            more = self.sinks[..., None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, more), -1)
        shares = scores.softmax(-1)[..., :count]
        weights = shares * (1 - shares)
        known = torch.cat((keys[:, 0], torch.ones_like(keys[:, 0, :, :1])), -1)
        of_keys = weights.sum((1, 2))
        self.first += _moment(known[:, :1], of_keys[:, :1])
        self.keys += _moment(known[:, 1:], of_keys[:, 1:])
        self.queries += _moment(queries[:, :, some].flatten(1, 2), weights.sum(-1).flatten(1))
        return out.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)

    def balanced(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(mean, A, feedback) of every head. cos and sin shift keys and queries to later positions:
        the calibration has seen RoPE at the first few hundred only."""
        keys = self.first + _shifted(self.keys, cos, sin)
        total = keys[:, -1:, -1:].clamp_min(1e-30)  # 0 for sequences of one token
        mean = keys[:, -1:, :-1] / total
        spread = keys[:, :-1, :-1] / total - mean.mT @ mean
        queries = _shifted(self.queries, cos, sin)
        transform = _balanced(spread, queries)
        inverse = torch.linalg.inv(transform)
        return mean[:, 0], transform, _feedback(inverse @ queries @ inverse.mT)


@torch.inference_mode()
def find_rotation(
    decoder: Decoder,
    sequences: Sequence[Sequence[int]],
    longest: int,  # tokens that a sequence may have when the model serves
    watch: Watch | None = None,
) -> Rotation:
    """From running the model over token sequences. `watch` is given K and V, K also at positions
    further on."""
    shape, device = decoder.shape, decoder.device
    moments = [Moments(shape, i, device, decoder.sinks(i)) for i in range(shape.layers)]
    cos, sin = shifts(decoder, max(map(len, sequences)), longest)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if watch is not None:
            for place in range(0, SHIFTS, 4):
                watch(layer, apply_rope(k.double(), cos[place], sin[place]), v)
        return moments[layer].attend(q, k, v)

    for sequence in sequences:
        tokens = torch.tensor(sequence, device=device)
        decoder.forward(tokens, torch.arange(len(sequence), device=device), attend)
    parts = zip(*(moment.balanced(cos, sin) for moment in moments), strict=True)
    return Rotation.of(*(torch.stack(part) for part in parts))


def shifts(decoder: Decoder, size: int, longest: int) -> tuple[Tensor, Tensor]:
    """RoPE that shifts a sequence of `size` tokens by 0 to longest - size positions, its end evenly
    on a logarithmic scale; (SHIFTS, rotary dimensions) fp64, as apply_rope takes them."""
    exponents = torch.linspace(
        0, math.log(max(longest, size) / size), SHIFTS, device=decoder.device
    )
    cos, sin = (x.double() for x in decoder.rope((size * exponents.expm1()).round().long()))
    length = torch.hypot(cos, sin)  # yarn's are longer than 1
    low, high = (sin / length).chunk(2, -1)
    return cos / length, torch.cat((-low, high), -1)


def hadamard(size: int, like: Tensor) -> Tensor:
    """Orthogonal, its first row constant; block by block where `size` is no power of two."""
    block = size & -size
    matrix: Tensor = torch.eye(size // block, dtype=like.dtype, device=like.device)
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=like.dtype, device=like.device)
    while len(matrix) < size:
        matrix = torch.kron(pair, matrix)
    matrix = matrix / block**0.5
    return matrix


def _moment(x: Tensor, weights: Tensor) -> Tensor:
    """(heads, n, size), (heads, n) -> (heads, size, size) fp64."""
    return (x.mT @ (x * weights[..., None])).double()


def _shifted(moment: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The mean over all shifts; what RoPE leaves (partial RoPE, the 1 of (k, 1)) stays."""
    cos, sin = cos[:, None, None], sin[:, None, None]
    many = moment.expand(len(cos), -1, -1, -1)
    rotated = apply_rope(apply_rope(many, cos, sin).mT, cos, sin)
    return rotated.mean(0)


def _balanced(keys: Tensor, queries: Tensor) -> Tensor:
    """A, of determinant 1: a common factor would cancel between keys and queries."""
    spread, axes = torch.linalg.eigh(_floored(keys))
    root, inverse = axes * spread.sqrt()[:, None], axes / spread.sqrt()[:, None]
    powers, mixed = torch.linalg.eigh(root.mT @ _floored(queries) @ root)
    powers, mixed = powers.flip(-1).clamp_min(1e-12), mixed.flip(-1)  # the largest first
    sizes = powers ** (BALANCE / 2)
    sizes[:, 0] *= LARGEST_GAIN
    transform: Tensor = (inverse @ mixed * sizes[:, None]) @ hadamard(keys.shape[-1], keys)
    size = torch.linalg.slogdet(transform).logabsdet / transform.shape[-1]
    balanced: Tensor = transform / size.exp()[:, None, None]
    return balanced


def _feedback(queries: Tensor) -> Tensor:
    """Errors e of a block of channels and r of all later ones change a score by (e, r) Q (e, r)^T
    in the mean square, with Q the queries' second moment: least at r = -e Q_er Q_rr^-1."""
    floored = _floored(queries, FEEDBACK_FLOOR)
    feedback = torch.zeros_like(floored)
    for now, later in channel_blocks(floored.shape[-1]):
        to_later = torch.linalg.solve(floored[:, later, later], floored[:, later, now]).mT
        feedback[:, now, later] = to_later
    return feedback


def _floored(moment: Tensor, floor: float = FLOOR) -> Tensor:
    size = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(1e-30)
    eye = torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
    return moment + floor * size * eye
