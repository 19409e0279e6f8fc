"""Mixtures of experts as modules: Experts holds one gate, up and down linear per expert, dense or
packed, in place of transformers' fused weights.

Routers stay transformers' own: they call Experts with each token's experts and their weights. An
expert runs once a call, on all tokens that are routed to it; experts without tokens do not run.
Where their op can, all experts run in a few launches instead (ExpertsOp).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear, silu

from billfish.checkpoints.experts import Layout, fusing_rules
from billfish.schemes.base import ExpertsOp, watched

Leaves = tuple[str, str, str]  # names of gate, up and down
LEAVES: Leaves = ("gate_proj", "up_proj", "down_proj")
# Names of an expert's parameters -> their values: `Experts.lend`
Lend = Callable[[int, Sequence[str]], dict[str, Tensor]]


class Gating(nn.Module):
    """gate, up -> the input of down, as transformers' experts of this model compute it."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        fused._parameters.clear()  # only its rule is needed
        self.rule = (fused,)  # in a tuple: no submodule, which transformers would initialize
        # Whether all gates come before all ups, or they take turns; found by trial, as transformers
        # says it from 5.7 on only: the second number changes the second output, or the first.
        pair = torch.ones(2, 4, device="cpu")
        pair[1, 1] = 2
        one, other = fused._apply_gate(pair)
        self.concatenated = bool(one[1] != other[1])

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        both = (
            torch.cat((gate, up), -1)
            if self.concatenated
            else torch.stack((gate, up), -1).flatten(-2)
        )
        mixed: Tensor = self.rule[0]._apply_gate(both)
        return mixed

    def is_linear_in_up(self) -> bool:
        """Whether a factor of up's output can be folded into down's columns; found by trial."""
        gate = torch.linspace(-3, 3, 64)
        up = gate.flip(0) * 8
        return torch.allclose(self(gate, 0.5 * up), 0.5 * self(gate, up), rtol=1e-4, atol=1e-5)

    def is_swiglu(self) -> bool:
        """Whether it is silu(gate) * up; found by trial."""
        gate = torch.linspace(-9, 9, 64)
        up = gate.flip(0) * 8
        return torch.allclose(self(gate, up), silu(gate) * up, rtol=1e-4, atol=1e-5)


class Expert(nn.Module):
    """Gate, up and down, under the names that the checkpoint has for them."""

    def __init__(self, leaves: Leaves, hidden: int, wide: int, **how: Any) -> None:
        super().__init__()
        for leaf, (k, n) in zip(
            leaves, ((hidden, wide), (hidden, wide), (wide, hidden)), strict=True
        ):
            self.add_module(leaf, nn.Linear(k, n, **how))

    def forward(self, x: Tensor, gating: Gating) -> Tensor:
        gate, up, down = self.children()
        out: Tensor = down(gating(gate(x), up(x)))
        return out


class Experts(nn.Module):
    """Children "0", "1", ... are the experts."""

    def __init__(self, fused: Any, leaves: Leaves) -> None:
        super().__init__()
        self.count, one, two = fused.gate_up_proj.shape
        hidden, both = (one, two) if fused.is_transposed else (two, one)
        how = {"bias": bool(fused.has_bias), "device": "meta", "dtype": fused.gate_up_proj.dtype}
        self.leaves, self.gating = leaves, Gating(fused)
        self.layout = Layout(fused.is_transposed, not self.gating.concatenated)  # of `fused`
        for expert in range(self.count):
            self.add_module(str(expert), Expert(leaves, hidden, both // 2, **how))
        self.op: ExpertsOp | None = None  # all experts at once: models/joined.py, stack
        self.lend: Lend | None = None  # values of parameters that are on the meta device
        self.idle = False

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """(tokens, hidden) of tokens whose experts are `index` (tokens, experts a token)."""
        if self.idle:
            return stand_in(hidden, index, weights)
        if self.op is not None and not watched(hidden):
            return self.op(hidden, index, weights)
        out = torch.zeros_like(hidden, dtype=torch.float32)
        for expert, rows, places in routed(index, self.count):
            y = self.run(expert, hidden[rows]) * weights[rows, places, None]
            out.index_add_(0, rows, y.float())  # a token is in `rows` once: the order is fixed
        return out.to(hidden.dtype)

    def all(self) -> list[nn.Module]:
        return [self.get_submodule(str(expert)) for expert in range(self.count)]

    def run(self, expert: int, x: Tensor) -> Tensor:
        """Output of one expert for its tokens."""
        module = self.get_submodule(str(expert))
        absent = [name for name, p in module.named_parameters() if p.is_meta]
        if not absent:
            out: Tensor = module(x, self.gating)
            return out
        assert self.lend is not None, f"expert {expert} has no weights"
        lent: Tensor = functional_call(module, self.lend(expert, absent), (x, self.gating))
        return lent

    def _apply(self, fn: Any, recurse: bool = True) -> "Experts":
        """For `.to(device or dtype)`: the op is made for one device; its parts are moved."""
        self.op = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


@dataclass(frozen=True)
class Choice:
    """How a router chooses: the largest of the softmax of a linear's outputs."""

    several: int
    normalized: bool  # weights of a token add up to 1
    dtype: torch.dtype  # of weights

    @classmethod
    def of(cls, router: Any) -> "Choice | None":
        """The choice of transformers' router, found by trial; None if it is another one."""
        weight = getattr(router, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            return None
        source = torch.Generator().manual_seed(0)
        x = torch.randn(64, weight.shape[1], generator=source).to(weight.device, weight.dtype)
        given = router(x)
        if not isinstance(given, tuple) or len(given) != 3:
            return None
        _, weights, index = given
        for normalized in (False, True):
            made = cls(index.shape[-1], normalized, weights.dtype)
            mine, order = made(linear(x, weight))
            if torch.equal(order, index) and torch.allclose(mine, weights, rtol=1e-3):
                return made
        return None

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts, (tokens, several) each."""
        found, index = logits.softmax(-1, dtype=torch.float32).topk(self.several, -1)
        if self.normalized:
            found = found / found.sum(-1, keepdim=True)
        return found.to(self.dtype), index


def routed(index: Tensor, count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each expert with tokens: its number, its tokens, and its place in their rows of
    `index`."""
    flat, several = index.flatten(), index.shape[-1]
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=count)[:count].tolist()
    start = 0
    for expert, tokens in enumerate(counts):
        found = order[start : start + tokens]
        start += tokens
        if tokens:
            yield expert, found // several, found % several


def stand_in(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Something that depends on all that experts are given, without running them."""
    share = (weights.float() * (index + 1)).sum(-1, keepdim=True)
    return (hidden.float() * share).to(hidden.dtype)


@contextmanager
def idle_experts(block: nn.Module) -> Iterator[None]:
    """Within this context Experts return a stand-in: for passes that need only what is computed
    before or beside them, as reading all experts for each of those would take long."""
    found = [module for module in block.modules() if isinstance(module, Experts)]
    for module in found:
        module.idle = True
    try:
        yield
    finally:
        for module in found:
            module.idle = False


def is_fused(module: nn.Module) -> bool:
    """Whether these are experts of transformers in a layout that Experts can take over."""
    parts = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    layout = all(hasattr(module, name) for name in ("_apply_gate", "is_transposed", "has_bias"))
    # transformers up to 5.19 lacks this attribute.
    norm = getattr(module, "has_post_expert_norm", False)
    plain = getattr(module, "has_gate", False) and not norm
    return layout and plain and all(isinstance(p, Tensor) and p.ndim == 3 for p in parts)


def split_experts(model: Any) -> list[str]:
    """Put Experts with parameters on the meta device in place of transformers' fused experts;
    returns their names."""
    leaves = leaves_of(model.config)
    fused = [name for name, module in model.named_modules() if is_fused(module)]
    for name in fused:
        parent, _, child = name.rpartition(".")
        module = model.get_submodule(name)
        setattr(model.get_submodule(parent), child, Experts(module, leaves))
    return fused


def gates_of(model: nn.Module) -> set[str]:
    """Modules beside Experts that weigh them: routers, and the gates of shared experts. Each is one
    linear, or a module with one linear in it (AFMoE's router); shared experts have several."""
    found = set()
    for name, module in model.named_modules():
        if not any(isinstance(child, Experts) for child in module.children()):
            continue
        for path, child in module.named_children():
            linears = [
                inner
                for inner, part in child.named_modules(prefix=f"{name}.{path}")
                if isinstance(weight := getattr(part, "weight", None), Tensor) and weight.ndim == 2
            ]
            if len(linears) == 1:
                found.add(linears[0])
    return found


def leaves_of(config: Any) -> Leaves:
    """Names of an expert's linears in checkpoints of this model type, from the table by which
    transformers fuses them: w1, w3 and w2 in Mixtral's."""
    found: dict[str, list[str]] = {}
    for kind in (config.model_type, config.get_text_config().model_type):
        for rule in fusing_rules(kind):
            target = rule.target_patterns[0].rpartition(".")[2]
            found[target] = [source.split(".")[-2] for source in rule.source_patterns]
    names = [*found.get("gate_up_proj", []), *found.get("down_proj", [])]
    return (names[0], names[1], names[2]) if len(names) == 3 else LEAVES
