"""Times W4A16 products of Billfish, of Humming and of cuBLAS (fp16 or bf16) in turns.

    python scripts/peers.py --shapes llama3-8b,4096x4096 --m 1,16,256 --save peers.json

For each k x n the weights of all are made once, the same ones. For each m a graph of launches over
rotating copies is captured for each contestant (billfish/bench/timing.py), and all are replayed for
some 15 ms in turn, so that they see the same clocks and temperature:

    (A B C) A B C A B C ...    us: medians over the turns; the first round warms up

Humming is the PyPI package humming-kernels. Without it cuBLAS is the only peer.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from turns import Point, Runner, Track, energy, means, take_turns

from billfish.bench.kernels import DTYPES, circumstances
from billfish.bench.shapes import parse_rows, parse_shapes, words
from billfish.bench.timing import Rules
from billfish.errors import UserError
from billfish.schemes.base import STD
from billfish.schemes.registry import choose_op, compile_kernels
from billfish.schemes.w4a16 import W4A16

OURS, PEER, DENSE = "billfish", "humming", "cublas"
BEHIND = {DENSE: 0.03, PEER: 0.02}  # slower by more than this share is told
WRONG = 0.02  # relative error against cuBLAS on the decoded weights; rounding makes 0.001 to 0.005
ROWS = "1,2,4,8,12,16,17,24,32,48,64,96,128,160,200,256,384,512,1024,2048,4096"
RULES = Rules(
    rotating_bytes=250_000_000, least_copies=2, least_launches=4, most_launches=400, graph_us=2000
)
BYTES_PER_S, FLOP_PER_S = 4.5e12, 8e14  # of an H200: they decide how long graphs are, no more
TURNS, TURN_SECONDS = 5, 0.015

Layer = Callable[[Tensor], Tensor]
Maker = Callable[[int, int, list[dict[str, Tensor]]], list[Layer]]  # n, k, canonical tensors
Place = tuple[int, int, int]  # k, n, m


# -- contestants


def billfish_layers(scheme: W4A16, device: torch.device) -> Maker:
    def make(n: int, k: int, weights: list[dict[str, Tensor]]) -> list[Layer]:
        op = choose_op(scheme, n, k, device)
        return [op(scheme, tensors) for tensors in weights]

    return make


def cublas_layers(scheme: W4A16, dtype: torch.dtype) -> Maker:
    """The first copy is the decoded weight that others are compared with."""

    def make(n: int, k: int, weights: list[dict[str, Tensor]]) -> list[Layer]:
        dense = [scheme.dequantize(weights[0]).to(dtype)]
        while len(dense) < RULES.copies(n * k * dtype.itemsize, RULES.least_dense_copies):
            dense.append(torch.empty_like(dense[0]).normal_(std=STD))
        return [partial(linear, weight=weight) for weight in dense]

    return make


class Humming:
    """Humming with its own choice of tiles. `use_pdl` of its forward does not reach products of
    16-bit activations, and its choice for Hopper leaves dependent launches off; they are turned on
    in the tuning configuration. Of its intervals of m only those in use are kept: it compiles all
    that it is given."""

    def __init__(
        self, scheme: W4A16, dtype: torch.dtype, rows: Sequence[int], device: torch.device
    ) -> None:
        import humming
        from humming.layer import HummingLayer

        self.version, self.layer = humming.__version__, HummingLayer
        self.dtype, self.rows, self.device = dtype, rows, device
        self.config = {"dtype": "uint4", "group_size": max(scheme.group_size, 0)}
        if not scheme.symmetric:
            self.config["has_zero_point"] = True

    def prepare(self, shapes: Sequence[tuple[int, int]]) -> None:
        """Compiles what shapes (k, n) need: about 4 s a kernel and core, on all cores."""
        from humming.kernel.humming import HummingKernel
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_layer_config

        schema = HummingWeightSchema.from_config({**self.config, "quant_method": "humming"})

        def compile_shape(shape: tuple[int, int]) -> None:
            k, n = shape
            made = prepare_layer_config(
                n, k, schema, torch_dtype=self.dtype, device=self.device.index
            )
            HummingKernel.prepare_kernels(
                made.to_str(), None, self.tuning(made), device=self.device.index
            )

        # Each call has a thread a core; another one fills the cores where it ends.
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(compile_shape, shape) for shape in shapes]:
                done.exception()  # what fails here fails again, and is told, where it is timed

    def tuning(self, config: Any) -> str:
        from humming.tune import get_heuristics_config

        return json.dumps(
            [
                (least, most, {**chosen, "use_pdl": True})
                for least, most, chosen in get_heuristics_config(config, device=self.device.index)
                if any(least < m <= most for m in self.rows)
            ]
        )

    def __call__(self, n: int, k: int, weights: list[dict[str, Tensor]]) -> list[Layer]:
        layers = []
        for tensors in weights:
            with self.device:  # it makes its parameters where torch does
                layer = self.layer(n, k, weight_config={**self.config}, torch_dtype=self.dtype)
            told = {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}
            if "weight_zero_point" in tensors:
                told["zero_point"] = tensors["weight_zero_point"]
            layer.load_from_tensors(told)  # the same words in the same order
            layer.transform()
            layers.append(partial(layer, tuning_config=self.tuning(layer.humming_config)))
        return layers


# -- the run


@dataclass
class Peers:
    """Times all contestants at all places. `keep` is given the result after each shape."""

    track: Track
    makers: Mapping[str, Maker]
    scheme: W4A16
    dtype: torch.dtype
    places: Sequence[Place]
    energy_places: Sequence[Place] = ()
    energy_seconds: float = 5
    energy_rounds: int = 2
    late: Callable[[], bool] = lambda: False
    say: Callable[[str], None] = lambda message: print(message, flush=True)
    keep: Callable[[Point], None] = lambda result: None

    def measure(self, result: Point) -> Point:
        self.generator = torch.Generator(self.track.device).manual_seed(0)
        wanted = list(dict.fromkeys([*self.places, *self.energy_places]))
        result |= {"complete": False, "points": [], "errors": {}}
        for k, n in dict.fromkeys((k, n) for k, n, _ in wanted):
            rows = [m for place in wanted if place[:2] == (k, n) for m in place[2:]]
            if not self.late():
                self._shape(k, n, rows, result)
            done = {(point["k"], point["n"], point["m"]) for point in result["points"]}
            result["missing"] = [called(*place) for place in wanted if place not in done]
            self.keep(result)
        result["complete"] = not result["missing"]
        self.keep(result)
        return result

    def _shape(self, k: int, n: int, rows: Sequence[int], result: Point) -> None:
        errors: dict[str, str] = {}

        def failed(contestant: str, error: Exception) -> None:
            if contestant not in errors:  # once a shape
                errors[contestant] = f"{type(error).__name__}: {str(error).strip()[:500]}"
                result["errors"][f"{k}x{n}"] = errors
                self.say(f"{k}x{n}: {contestant} failed: {errors[contestant]}")

        weights = [
            self.scheme.random_tensors(n, k, self.dtype, self.generator)
            for _ in range(RULES.copies(n * k // 2, RULES.least_copies))
        ]
        layers = {}
        for contestant, make in self.makers.items():
            try:
                layers[contestant] = make(n, k, weights)
            except Exception as error:  # also of other people's code: the others go on
                failed(contestant, error)
        del weights
        for m in rows:
            if self.late():
                break
            result["points"].append(point := self._point(k, n, m, layers, failed))
            self.say(line(point))
            if "energy" in point:
                self.say(energy_line(point))
        del layers
        if self.track.device.type == "cuda":
            torch.cuda.empty_cache()

    def _point(
        self,
        k: int,
        n: int,
        m: int,
        layers: Mapping[str, list[Layer]],
        failed: Callable[[str, Exception], None],
    ) -> Point:
        x = torch.randn(m, k, generator=self.generator, device=self.track.device).to(self.dtype)
        runners: dict[str, Runner] = {}
        outputs: dict[str, Tensor] = {}
        point: Point = {"k": k, "n": n, "m": m, "us": {}, "spread": {}}
        try:
            for contestant, copies in layers.items():
                nbytes = n * k * (self.dtype.itemsize if contestant == DENSE else 0.5)
                least_us = max(nbytes / BYTES_PER_S, 2 * m * n * k / FLOP_PER_S) * 1e6
                launches = RULES.launches(len(copies), least_us)
                try:
                    with torch.inference_mode():
                        output = copies[0](x)
                    calls = [partial(layer, x) for layer in copies]
                    runners[contestant] = Runner(self.track.capture(calls, launches), launches)
                    outputs[contestant] = output
                except Exception as error:
                    failed(contestant, error)
            point["off"] = off(outputs)
            del outputs
            times, read = take_turns(self.track, runners, TURNS, TURN_SECONDS)
            for who, each in times.items():
                us = statistics.median(each)
                point["us"][who] = round(us, 3)
                point["spread"][who] = round((max(each) - min(each)) / us, 4)
            point |= read
            if (k, n, m) in self.energy_places:
                point["energy"] = {name: [] for name in runners}
                for contestant in [*runners] * self.energy_rounds:
                    told = energy(self.track, runners[contestant], self.energy_seconds)
                    point["energy"][contestant].append(told)
        finally:
            for runner in runners.values():
                runner.graph.reset()
        return point


def off(outputs: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative error of each against cuBLAS: all have the same first copy of the weights."""
    if DENSE not in outputs:
        return {}
    exact = outputs[DENSE].float()
    size = exact.norm()
    return {
        name: float((y.float() - exact).norm() / size)
        for name, y in outputs.items()
        if name != DENSE
    }


# -- words


def called(k: int, n: int, m: int) -> str:
    return f"{k}x{n}@{m}"


def ratio(point: Point, peer: str) -> float | None:
    """How many times as fast as `peer` we are; None if one of the two has no time."""
    us = point["us"]
    return us[peer] / us[OURS] if OURS in us and peer in us else None


def behind(point: Point, peer: str) -> bool:
    found = ratio(point, peer)
    return found is not None and found < 1 / (1 + BEHIND[peer])


def line(point: Point) -> str:
    told = [f"{called(point['k'], point['n'], point['m']):>17}"]
    told += [f"{who} {us:8.2f}" for who, us in point["us"].items()]
    for peer in BEHIND:
        found = ratio(point, peer)
        told += [] if found is None else [f"x {peer} {found:.3f}"]
    told += [_read(point)]
    told += [f"BEHIND {peer}" for peer in BEHIND if behind(point, peer)]
    told += [f"WRONG {who} ({by:.1e})" for who, by in point["off"].items() if not by <= WRONG]
    return "  ".join(told)


def energy_line(point: Point) -> str:
    told = []
    for who, rounds in point["energy"].items():
        mj = [each["mj"] for each in rounds if each["mj"] is not None]
        mean = f"{statistics.mean(mj):.3f} mJ" if mj else "mJ unknown"
        us = statistics.mean(each["us"] for each in rounds)
        told.append(f"{who} {mean} {us:.2f} us {_read(means(rounds))}")
    return f"{called(point['k'], point['n'], point['m']):>17}  energy: " + "; ".join(told)


def _read(told: Point) -> str:
    units = {"sm_mhz": "MHz", "watts": "W", "celsius": "C"}
    return " ".join(f"{told[key]:.0f} {unit}" for key, unit in units.items() if told[key])


def summary(result: Point, worst: int = 5) -> list[str]:
    points = result["points"]
    lines = []
    for peer in BEHIND:
        found = [(told, called(p["k"], p["n"], p["m"])) for p in points if (told := ratio(p, peer))]
        if not found:
            lines.append(f"{peer}: no point compared")
            continue
        ahead = sum(told > 1 for told, _ in found)
        mean = statistics.geometric_mean([told for told, _ in found])
        late = [called(p["k"], p["n"], p["m"]) for p in points if behind(p, peer)]
        least = ", ".join(f"{told:.3f} at {place}" for told, place in sorted(found)[:worst])
        lines.append(f"{peer}: ahead at {ahead} of {len(found)} points, {mean:.3f} times as fast")
        lines.append(f"  worst: {least}")
        listed = " ".join(late) or "none"
        lines.append(f"  behind by more than {BEHIND[peer]:.0%}: {len(late)}: {listed}")
    wrong = [
        f"{who} {called(p['k'], p['n'], p['m'])}"
        for p in points
        for who, by in p["off"].items()
        if not by <= WRONG
    ]
    lines += [f"WRONG results: {', '.join(wrong)}"] if wrong else []
    for shape, errors in result["errors"].items():
        lines += [f"{shape}: {who} failed: {error}" for who, error in errors.items()]
    if result["missing"]:
        lines.append(f"not measured: {' '.join(result['missing'])}")
    return lines


def write(result: Point, path: Path) -> None:
    """Atomically, a point a line."""
    points = ",\n".join(json.dumps(point) for point in result["points"])
    head = json.dumps({**result, "points": []})
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(head.replace('"points": []', f'"points": [\n{points}]') + "\n")
    os.replace(temporary, path)


def parse_places(text: str) -> list[Place]:
    """ "4096x4096@16" -> (k, n, m)"""
    found = []
    for word in words(text):
        shape, _, m = word.partition("@")
        sets, rows = parse_shapes(shape), parse_rows(m)
        found += [(each.k, each.n, m) for made in sets for each in made.linears for m in rows]
    return found


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--shapes", help="models, or K x N of linears: llama3-8b,4096x4096")
    parser.add_argument("--m", default=ROWS, help="batch sizes, such as 1,2,4 or 1-16")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--asym", action="store_true", help="weights with zero points")
    parser.add_argument("--save", type=Path, metavar="FILE.json")
    parser.add_argument("--seconds-limit", type=float, metavar="N", help="start no point after N s")
    parser.add_argument("--energy", default="", help="points KxN@M whose energy is measured, too")
    parser.add_argument("--energy-seconds", type=float, default=5, help="of each run")
    parser.add_argument("--energy-rounds", type=int, default=2, help="runs of each contestant")
    args = parser.parse_args()

    energy_places = parse_places(args.energy) if args.energy else []
    shapes = args.shapes or ("" if energy_places else "llama3-8b")
    rows = parse_rows(args.m)
    linears = [each for made in (parse_shapes(shapes) if shapes else ()) for each in made.linears]
    places = list(dict.fromkeys((each.k, each.n, m) for each in linears for m in rows))
    scheme, dtype = W4A16(4, args.group, not args.asym), DTYPES[args.dtype]
    for k, n, _ in [*places, *energy_places]:
        if reason := scheme.refuses(n, k):
            raise UserError(f"{k}x{n}: {reason}.")

    track = Track(RULES)
    device = track.device
    compile_kernels([scheme], dtype, device)
    makers: dict[str, Maker] = {OURS: billfish_layers(scheme, device)}
    versions = {}
    try:
        every = sorted({m for *_, m in [*places, *energy_places]})
        makers[PEER] = humming = Humming(scheme, dtype, every, device)
        versions[PEER] = f"humming-kernels {humming.version}, dependent launches on"
        started = time.monotonic()
        humming.prepare(list(dict.fromkeys((k, n) for k, n, _ in [*places, *energy_places])))
        print(f"{versions[PEER]}; compiled in {time.monotonic() - started:.0f} s", flush=True)
    except Exception as error:  # ImportError, or whatever its import runs into
        makers.pop(PEER, None)
        versions[PEER] = f"not compared: {type(error).__name__}: {error}"
        print(f"humming: {versions[PEER]}", flush=True)
    makers[DENSE] = cublas_layers(scheme, dtype)

    result = {
        "result_version": "peers 1",
        **circumstances(track.facts()),
        "command": shlex.join(["python", *sys.argv]),
        "protocol": f"us a launch: graphs over rotating copies of the weights "
        f"({RULES.rotating_bytes / 1e6:.0f} MB), replayed in turns of {TURN_SECONDS * 1e3:.0f} ms; "
        f"median of {TURNS} turns, after one",
        "versions": versions,
        "group_size": args.group,
        "dtype": args.dtype,
        "symmetric": not args.asym,
    }
    limit = args.seconds_limit
    peers = Peers(
        track,
        makers,
        scheme,
        dtype,
        places,
        energy_places,
        args.energy_seconds,
        args.energy_rounds,
        late=lambda: limit is not None and time.monotonic() - began > limit,
        keep=lambda told: write(told, args.save) if args.save else None,
    )
    print("\n".join(summary(peers.measure(result))))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
