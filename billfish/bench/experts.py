"""`bench experts`: all experts of a layer, by batch size, against 16-bit weights in torch's grouped
product and against the roofline.

    floor = max(bytes / read bandwidth, 6 pairs hidden intermediate / compute peak)

Bytes are the weights of the experts that a routing touches, x and y; bandwidth is what plain reads
reach in this run. Routings are random, another for each launch. From router to sum everything is
timed but the router. torch's products are given sorted rows and leave them unsummed.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from billfish.bench.kernels import DTYPES, circumstances, refuse_unknown
from billfish.bench.peaks import peaks_of
from billfish.bench.random_model import config_of
from billfish.bench.timing import MODES, Card, Rules
from billfish.checkpoints.experts import COUNTS
from billfish.errors import UserError
from billfish.schemes import DEFAULT
from billfish.schemes.base import STD, ExpertsOp
from billfish.schemes.registry import choose_op, with_options

Result = dict[str, Any]
RESULT_VERSION = 1
ROUTINGS = 16  # at least, in a graph


@dataclass(frozen=True)
class Mixture:
    """Sizes of a layer."""

    name: str
    experts: int
    several: int  # experts of a token
    hidden: int
    wide: int

    @classmethod
    def of(cls, name: str) -> "Mixture":
        config = config_of(name)
        count = next((n for key in COUNTS if isinstance(n := getattr(config, key, None), int)), 0)
        if not count:
            raise UserError(
                f"model {name!r}: has no experts. Give a mixture, such as qwen3-30b-a3b, "
                "mixtral-8x7b or a config.json of one."
            )
        wide = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        return cls(name, count, config.num_experts_per_tok, config.hidden_size, wide)


@dataclass(frozen=True)
class ExpertsRequest:
    mixtures: tuple[Mixture, ...]
    rows: tuple[int, ...]  # batch sizes m
    scheme: str = DEFAULT
    group_size: int = 128
    symmetric: bool = True
    dtype: str = "bfloat16"
    modes: tuple[str, ...] = MODES

    def __post_init__(self) -> None:
        refuse_unknown("dtype", (self.dtype,), DTYPES)
        refuse_unknown("mode", self.modes, MODES)


class ExpertsBench:
    """One request on one card. `keep` is given the result so far after each point."""

    def __init__(
        self,
        request: ExpertsRequest,
        card: Card,
        rules: Rules,
        say: Callable[[str], None] = lambda message: None,
        keep: Callable[[Result], None] = lambda result: None,
    ) -> None:
        self.request, self.card, self.rules, self.say, self.keep = request, card, rules, say, keep
        self.device, self.dtype = card.device, DTYPES[request.dtype]
        self.generator = torch.Generator(self.device).manual_seed(0)
        self.points: list[Result] = []

    def measure(self) -> Result:
        self.say("what the card can do")
        facts, ceilings = self.card.facts(), self.card.ceilings()
        peaks = peaks_of(facts["name"], ceilings)
        self.peaks = replace(peaks, bytes_per_s=ceilings["read_bytes_per_s"])
        result = {
            "bench": "experts",
            "result_version": RESULT_VERSION,
            "complete": False,
            **circumstances(facts),
            "ceilings": ceilings,
            "peaks": asdict(self.peaks),
            "protocol": asdict(self.rules),
            "request": asdict(self.request),
            "points": self.points,
        }
        for mixture in self.request.mixtures:
            self.say(f"{mixture.name}: weights of {mixture.experts} experts")
            routings = {m: self._routings(mixture, m) for m in self.request.rows}
            dense = {m: self._dense(mixture, m, given) for m, given in routings.items()}
            layers = self._layers(mixture)
            for m in self.request.rows:
                self.say(f"{mixture.name}, m = {m}")
                self.points.append(self._point(mixture, m, layers, routings[m], dense[m]))
                self.keep(result)
            del layers
        result["complete"] = True
        self.keep(result)
        return result

    def _point(
        self,
        mixture: Mixture,
        m: int,
        layers: Sequence[ExpertsOp],
        routings: Sequence[Tensor],
        dense_us: float | None,
    ) -> Result:
        each = sum(part.nbytes() for part in layers[0].parts[0])
        active = sum(len(set(index.flatten().tolist())) for index in routings) / len(routings)
        nbytes = active * each + 2 * m * mixture.hidden * self.dtype.itemsize
        flop = 6 * m * mixture.several * mixture.hidden * mixture.wide
        floor = self.peaks.floor_us(nbytes, flop)
        x = self._randn(m, mixture.hidden)
        calls = []
        for number, index in enumerate(routings):
            weights = torch.rand(index.shape, device=self.device).to(self.dtype)
            calls.append(partial(layers[number % len(layers)], x, index, weights))
        launches = self.rules.launches(len(calls), floor)
        us = {mode: asdict(self.card.time(calls, launches, mode)) for mode in self.request.modes}
        median = us[self.request.modes[0]]["median"]
        return {
            **asdict(mixture),
            "m": m,
            "active": active,
            "bytes": nbytes,
            "flop": flop,
            "floor_us": floor,
            "us": us,
            "roofline": floor / median,
            "grouped_us": dense_us,
            "speedup": dense_us / median if dense_us else None,
        }

    # -- weights and routings

    def _layers(self, mixture: Mixture) -> list[ExpertsOp]:
        """As many as the L2 cache cannot hold, and two at least: launches go round them."""
        made: list[ExpertsOp] = []
        asked = self.request
        scheme = with_options(asked.scheme, group_size=asked.group_size, symmetric=asked.symmetric)
        sizes = ((mixture.wide, mixture.hidden),) * 2 + ((mixture.hidden, mixture.wide),)
        wanted = 2
        while len(made) < wanted:
            ops = [
                [
                    choose_op(scheme, n, k, self.device)(
                        scheme, scheme.random_tensors(n, k, self.dtype, self.generator)
                    )
                    for n, k in sizes
                ]
                for _ in range(mixture.experts)
            ]
            op = type(ops[0][0]).stack(ops, self.dtype)
            if op is None:
                raise UserError(
                    f"{mixture.name}, {scheme.describe()}, {asked.dtype} on {self.device}: no op "
                    "runs all experts of such a layer at once; w4a16's does on Hopper."
                )
            made.append(op)
            held = sum(part.nbytes() for parts in op.parts for part in parts)
            wanted = self.rules.copies(held, 2)
        return made

    def _routings(self, mixture: Mixture, m: int) -> list[Tensor]:
        """Experts of each token, (m, several). Of few tokens they follow each other in a shuffled
        deck: drawn at random, some would have been read just before and still be in the cache."""
        pairs, count = m * mixture.several, mixture.experts
        if 4 * pairs > count or count % pairs:
            scores = [
                torch.rand(m, count, device=self.device, generator=self.generator)
                for _ in range(ROUTINGS)
            ]
            return [each.topk(mixture.several, -1).indices for each in scores]
        decks = [
            torch.randperm(count, device=self.device, generator=self.generator)
            for _ in range(-(-ROUTINGS * pairs // count))
        ]
        return list(torch.cat(decks).view(-1, m, mixture.several))

    def _dense(self, mixture: Mixture, m: int, routings: Sequence[Tensor]) -> float | None:
        """Median us of torch's grouped products; None where torch does not run them."""
        hidden, wide, count = mixture.hidden, mixture.wide, mixture.experts
        self.say(f"{mixture.name}, m = {m}: 16 bits, torch's grouped products")
        try:
            gate_up = self._randn(count, 2 * wide, hidden).mul_(STD).transpose(1, 2)
            down = self._randn(count, hidden, wide).mul_(STD).transpose(1, 2)
            x, calls = self._randn(m, hidden), []
            for index in routings:
                order = index.flatten().argsort(stable=True)
                ends = index.flatten().bincount(minlength=count).cumsum(0).to(torch.int32)
                calls.append(partial(_grouped, x[order // mixture.several], gate_up, down, ends))
            touched = gate_up.nbytes + down.nbytes
            floor = self.peaks.floor_us(touched, 0)
            return self.card.time(calls, self.rules.launches(len(calls), floor), "pdl").median
        except (RuntimeError, AttributeError) as error:  # torch.OutOfMemoryError is one
            self.say(f"torch._grouped_mm: {str(error).splitlines()[0]}")
            return None

    def _randn(self, *size: int) -> Tensor:
        made = torch.empty(size, dtype=self.dtype, device=self.device)
        return made.normal_(generator=self.generator)


def _grouped(x: Tensor, gate_up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
    """x sorted by expert, of which each has the rows up to its `ends`."""
    gate, up = torch._grouped_mm(x, gate_up, offs=ends).chunk(2, -1)
    out: Tensor = torch._grouped_mm(silu(gate) * up, down, offs=ends)
    return out
