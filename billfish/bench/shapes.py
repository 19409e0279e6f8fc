"""The shapes that benchmarks measure: sets of linears k x n by model, and lists of batch sizes.

Serving fuses q, k, v into one linear and gate, up into another, so that a decoder layer has four.
"""

import re
from dataclasses import dataclass

from billfish.errors import UserError


@dataclass(frozen=True)
class LinearShape:
    name: str  # qkv, o, gate_up, down; empty for a literal shape
    k: int
    n: int


@dataclass(frozen=True)
class ShapeSet:
    name: str
    linears: tuple[LinearShape, ...]

    @property
    def is_layer(self) -> bool:
        """Whether the linears make up a decoder layer, which is also measured as a whole."""
        return len(self.linears) == 4

    def label(self, linear: LinearShape) -> str:
        return f"{self.name} {linear.name}".strip()


def decoder(name: str, hidden: int, heads: int, kv_heads: int, head: int, mlp: int) -> ShapeSet:
    """The four linears of a decoder layer with gated MLP."""
    return ShapeSet(
        name,
        (
            LinearShape("qkv", hidden, (heads + 2 * kv_heads) * head),
            LinearShape("o", heads * head, hidden),
            LinearShape("gate_up", hidden, 2 * mlp),
            LinearShape("down", mlp, hidden),
        ),
    )


SETS = {
    made.name: made
    for made in (
        decoder("llama2-7b", 4096, 32, 32, 128, 11008),
        decoder("llama3-8b", 4096, 32, 8, 128, 14336),
        decoder("llama3-70b", 8192, 64, 8, 128, 28672),
        decoder("mistral-7b", 4096, 32, 8, 128, 14336),
        decoder("qwen2.5-7b", 3584, 28, 4, 128, 18944),
        decoder("qwen3-8b", 4096, 32, 8, 128, 12288),
        decoder("smollm2-135m", 576, 9, 3, 64, 1536),
    )
}


def parse_shapes(text: str) -> tuple[ShapeSet, ...]:
    """ "llama3-8b,4096x4096" -> sets, each once, in the order given."""
    found: dict[str, ShapeSet] = {}
    for name in words(text):
        literal = re.fullmatch(r"(\d+)x(\d+)", name)
        if literal:
            k, n = int(literal[1]), int(literal[2])
            if not k or not n:
                raise UserError(f"shapes {name!r}: k and n are 1 or more.")
            found[name] = ShapeSet(name, (LinearShape("", k, n),))
        elif name in SETS:
            found[name] = SETS[name]
        else:
            raise UserError(
                f"shapes {name!r} are unknown. Known: {', '.join(SETS)}; "
                "or K x N of one linear, such as 4096x14336."
            )
    if not found:
        raise UserError(f"shapes {text!r}: none given. Known: {', '.join(SETS)}.")
    return tuple(found.values())


def parse_rows(text: str) -> tuple[int, ...]:
    """ "1,2,8-10" -> (1, 2, 8, 9, 10): batch sizes m, rising, each once."""
    rows: set[int] = set()
    for word in words(text):
        span = re.fullmatch(r"(-?\d+)(?:-(-?\d+))?", word)
        if not span:
            raise UserError(f"m {word!r}: give numbers and ranges, such as 1,2,4 or 1-16,32.")
        first, last = int(span[1]), int(span[2] or span[1])
        if first < 1 or last < 1:
            raise UserError(f"m {word!r}: a batch has 1 row or more.")
        if last < first:
            raise UserError(f"m {word!r}: a range rises; did you mean {last}-{first}?")
        rows.update(range(first, last + 1))
    if not rows:
        raise UserError(f"m {text!r}: none given. Give numbers and ranges, such as 1,2,4 or 1-16.")
    return tuple(sorted(rows))


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
