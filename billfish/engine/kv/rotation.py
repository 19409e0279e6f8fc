"""Turn: what kv4 codes instead of K, so that 4 bits are enough.

Attention sees K through q k^T alone, and softmax ignores a constant. So with any matrix A

    k' = (k - mean) A      q' = q A^-T      q' k'^T = q k^T - q mean^T, the same for all keys

and A can be chosen for the coding, whose noise is one size in all channels of k' and does harm by
how large q' is. Least harm is done where k' and q' are alike: with A their second moments, weighed
by how much a score changes attention, p (1 - p), are diagonal together, variances lambda^a and
lambda^(1 - a). Hadamard's matrix then spreads every direction over all codes; the largest, enlarged
fivefold, becomes the one in which all codes are equal: it moves a token's `low`, of 16 bits.
What queries see of the errors of some channels others can make good in part: `carry`.
V is coded as it comes. docs/LOG.md has the figures.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from billfish.errors import UserError
from billfish.models.decoder import Decoder, Shape, _rotate

TEXTS, TOKENS = 4, 512  # of a calibration
QUERIES = 4  # every fourth is asked what it attends to
SHIFTS = 64  # places in a long text that the moments are averaged over
BALANCE = 0.35  # a
BLOCKS = 4  # of channels that are coded one after the other; store.cuh has it, too
LEVEL = 5.0  # how much more of the largest direction goes into `low`
FLOOR = 1e-3  # of the mean variance, added to all
CAREFUL = 5e-2  # the same where errors are carried over

STORED = ("kv_mean", "kv_turn", "kv_carry")
Watch = Callable[[int, Tensor, Tensor], None]  # layer, k, v


@dataclass(frozen=True)
class Turn:
    mean: Tensor  # (layers, kv_heads, head_dim) fp32
    to_keys: Tensor  # (layers, kv_heads, head_dim, head_dim) fp32: A
    to_queries: Tensor  # A^-T
    carry: Tensor  # the same: an error of a channel of k' -> what later ones are changed by

    def keys(self, layer: int, k: Tensor) -> Tensor:  # (tokens, kv_heads, head_dim) -> fp32
        return torch.einsum("thi,hij->thj", k.float() - self.mean[layer], self.to_keys[layer])

    def queries(self, layer: int, q: Tensor) -> Tensor:  # (tokens, heads, head_dim) -> fp32
        tokens, _, size = q.shape
        groups = q.float().reshape(tokens, self.mean.shape[1], -1, size)
        return torch.einsum("thgi,hij->thgj", groups, self.to_queries[layer]).flatten(1, 2)

    def to(self, device: torch.device) -> "Turn":
        return Turn(*(tensor.to(device) for tensor in vars(self).values()))

    def tensors(self) -> dict[str, Tensor]:
        """As safetensors takes them; queries follow from keys."""
        kept = (self.mean, self.to_keys, self.carry)
        return {name: tensor.cpu() for name, tensor in zip(STORED, kept, strict=True)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], shape: Shape) -> "Turn":
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
    def of(cls, mean: Tensor, keys: Tensor, carry: Tensor) -> "Turn":
        queries = torch.linalg.inv(keys.double()).mT
        return cls(mean.float(), keys.float(), queries.float(), carry.float())


class Moments:
    """Sums over a calibration text of one layer; fp64."""

    def __init__(self, shape: Shape, layer: int, device: torch.device) -> None:
        self.scale, self.heads, self.window = shape.scale, shape.kv_heads, shape.windows[layer]
        size = shape.head_dim
        zeros = torch.zeros(self.heads, size + 1, size + 1, dtype=torch.float64, device=device)
        # Of (k, 1): the last row is the sum of k, its corner the sum of weights. The first token
        # apart: it draws much of all attention, and stays where it is when texts grow.
        self.first, self.keys = zeros, zeros.clone()
        self.queries = zeros[:, 1:, 1:].clone()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention among these tokens, and what it tells of them."""
        count = len(q)
        queries = q.float().reshape(count, self.heads, -1, q.shape[-1]).permute(1, 2, 0, 3)
        keys, values = (x.float().transpose(0, 1)[:, None] for x in (k, v))
        here = torch.arange(count, device=q.device)
        seen = here <= here[:, None]
        if self.window is not None:
            seen &= here > here[:, None] - self.window
        shared_k, shared_v = (x.expand(-1, queries.shape[1], -1, -1) for x in (keys, values))
        causal = self.window is None or self.window >= count  # twice as fast as with a mask
        mask = None if causal else seen
        out = scaled_dot_product_attention(
            queries, shared_k, shared_v, mask, is_causal=causal, scale=self.scale
        )
        # Noise of a score changes attention by p (1 - p).
        some = slice(min(count, QUERIES) - 1, None, QUERIES)
        scores = queries[:, :, some] @ keys.mT * self.scale
        shares = scores.masked_fill_(~seen[some], -torch.inf).softmax(-1)
        weights = shares * (1 - shares)
        known = torch.cat((keys[:, 0], torch.ones_like(keys[:, 0, :, :1])), -1)
        of_keys = weights.sum((1, 2))
        self.first += _moment(known[:, :1], of_keys[:, :1])
        self.keys += _moment(known[:, 1:], of_keys[:, 1:])
        self.queries += _moment(queries[:, :, some].flatten(1, 2), weights.sum(-1).flatten(1))
        return out.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)

    def balanced(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(mean, A, carry) of every head. cos and sin move keys and queries to where they may be
        met: RoPE has shown them only near a text's begin."""
        keys = self.first + _shifted(self.keys, cos, sin)
        total = keys[:, -1:, -1:].clamp_min(1e-30)  # texts of one token tell nothing
        mean = keys[:, -1:, :-1] / total
        spread = keys[:, :-1, :-1] / total - mean.mT @ mean
        queries = _shifted(self.queries, cos, sin)
        turn = _balanced(spread, queries)
        back = torch.linalg.inv(turn)
        return mean[:, 0], turn, _carry(back @ queries @ back.mT)


@torch.inference_mode()
def calibrate(
    decoder: Decoder,
    texts: Sequence[Sequence[int]],
    far: int,  # tokens that a text may grow to
    watch: Watch | None = None,
) -> Turn:
    """From tokens of some texts. `watch` sees K and V, K also as it is in a long text."""
    shape, device = decoder.shape, decoder.device
    moments = [Moments(shape, layer, device) for layer in range(shape.layers)]
    cos, sin = shifts(decoder, max(map(len, texts)), far)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if watch is not None:
            for place in range(0, SHIFTS, 4):
                watch(layer, _rotate(k.double(), cos[place], sin[place]), v)
        return moments[layer].attend(q, k, v)

    for text in texts:
        tokens = torch.tensor(text, device=device)
        decoder.forward(tokens, torch.arange(len(text), device=device), attend)
    parts = zip(*(moment.balanced(cos, sin) for moment in moments), strict=True)
    return Turn.of(*(torch.stack(part) for part in parts))


def shifts(decoder: Decoder, size: int, far: int) -> tuple[Tensor, Tensor]:
    """RoPE that moves a text of `size` tokens by 0 up to far - size, evenly on a logarithmic scale
    of its end; (SHIFTS, rotary dimensions) fp64, as _rotate takes them."""
    exponents = torch.linspace(0, math.log(max(far, size) / size), SHIFTS, device=decoder.device)
    cos, sin = (x.double() for x in decoder.rope((size * exponents.expm1()).round().long()))
    length = torch.hypot(cos, sin)  # yarn's are longer than 1
    low, high = (sin / length).chunk(2, -1)
    return cos / length, torch.cat((-low, high), -1)


def hadamard(size: int, like: Tensor) -> Tensor:
    """Orthogonal, the first row constant; blocks of it where `size` is no power of two."""
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
    """The mean over all shifts; what is not rotated (partial RoPE, the 1 of (k, 1)) stays."""
    cos, sin = cos[:, None, None], sin[:, None, None]
    many = moment.expand(len(cos), -1, -1, -1)
    rotated = _rotate(_rotate(many, cos, sin).mT, cos, sin)
    return rotated.mean(0)


def _balanced(keys: Tensor, queries: Tensor) -> Tensor:
    """A, of determinant 1: a size would only be undone by the other side."""
    spread, axes = torch.linalg.eigh(_floored(keys))
    root, inverse = axes * spread.sqrt()[:, None], axes / spread.sqrt()[:, None]
    powers, mixed = torch.linalg.eigh(root.mT @ _floored(queries) @ root)
    powers, mixed = powers.flip(-1).clamp_min(1e-12), mixed.flip(-1)  # the largest first
    sizes = powers ** (BALANCE / 2)
    sizes[:, 0] *= LEVEL
    turn: Tensor = (inverse @ mixed * sizes[:, None]) @ hadamard(keys.shape[-1], keys)
    size = torch.linalg.slogdet(turn).logabsdet / turn.shape[-1]
    balanced: Tensor = turn / size.exp()[:, None, None]
    return balanced


def _carry(queries: Tensor) -> Tensor:
    """With errors e of a block of channels and r of all later ones queries of second moment Q see
    (e, r) Q (e, r)^T, least at r = -e Q_er Q_rr^-1."""
    careful = _floored(queries, CAREFUL)
    carry = torch.zeros_like(careful)
    for now, later in blocks(careful.shape[-1]):
        to_later = torch.linalg.solve(careful[:, later, later], careful[:, later, now]).mT
        carry[:, now, later] = to_later
    return carry


def blocks(size: int) -> list[tuple[slice, slice]]:
    """Channels that are coded together, and all behind them; not the last, which has none."""
    step = max(1, size // BLOCKS)
    return [(slice(i, i + step), slice(i + step, size)) for i in range(0, size - step, step)]


def _floored(moment: Tensor, floor: float = FLOOR) -> Tensor:
    size = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(1e-30)
    eye = torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
    return moment + floor * size * eye
