"""Times steps of the engine on a GPU, in turns in one process: between two processes those of
Llama-3-70B's shapes differed by 3.5 %.

    python scripts/steps.py parts --batch 1,16            decode steps without some of their parts
    python scripts/steps.py against ../other --batch 1,8  beside w4a16 kernels of another checkout
    python scripts/steps.py prompts                       prompts beside 16 decodes

Random weights in w4a16 and a 16-bit cache; some 100 tokens a sequence. What a step without a part
computes with is what memory holds: where power limits the clock, such a step is faster than with
real numbers.
"""

import argparse
import functools
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peers import write
from torch import Tensor
from turns import Point, Runner, Track, take_turns

from billfish.bench import random_model
from billfish.bench.kernels import circumstances
from billfish.bench.shapes import parse_rows
from billfish.bench.timing import Rules
from billfish.engine.cuda.runner import GpuRunner, buckets
from billfish.engine.llm import LLM
from billfish.engine.runner import Decoded
from billfish.engine.sampling import SamplingParams
from billfish.errors import UserError
from billfish.kernels import jit
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cuda import instances, plan

SCHEME = W4A16(4, 128)
INPUT, OUTPUT = 64, 33  # tokens of the texts that fill the tables
TURNS, TURN_SECONDS = 12, 0.02
PRODUCTS = ("qkv", "o", "gate_up", "down")
SHARED = ("attention", "norms", "head", "draw")
DECODES = 16  # beside prompts
PROMPTS = {
    "300": [300],
    "200": [200],
    "1000": [1000],
    "4 x 128": [128] * 4,
    "2 x 400": [400, 400],
    "12 x 60": [60] * 12,
}
MOST_PROMPTS = max(map(len, PROMPTS.values()))
ROUNDS = 24  # steps with the same prompts


def engine(config: Any, device: torch.device, tokens: int, sequences: int, **settings: Any) -> LLM:
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model = random_model.empty_model(config, dtype)
    random_model.fill(model, SCHEME, device)
    return LLM.of(
        model,
        random_model.Silent(),
        given=True,
        max_model_len=tokens,
        max_num_seqs=sequences,
        prefix_caching=False,
        **settings,
    )


def texts(llm: LLM, lengths: Sequence[int], tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(0, llm.vocabulary, (length,), generator=generator).tolist()
        for length in lengths
    ]
    llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))


# -- decode steps without some of their parts


@contextmanager
def without(runner: Any, rows: int, parts: Sequence[str]) -> Iterator[None]:
    """The runner's steps of `rows` rows leave these parts out."""
    decoder = runner.decoder

    def of(width: int) -> Callable[[Any], Tensor]:
        return lambda given: torch.empty(rows, width, dtype=decoder.dtype, device=decoder.device)

    shape, layers = decoder.shape, decoder.layers
    hidden, inner = decoder.embed.weight.shape[1], layers[0].mlp.down_proj.in_features
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    tokens = decoder.embed.weight.shape[0]
    places: dict[str, list[tuple[Any, str, Any]]] = {
        "attention": [(runner, "_attend_joined", lambda *given: None)],
        "norms": [(runner.fused, "norm", lambda *given: None)],
        "head": [(decoder, "head", of(tokens))],
        "draw": [(runner.fused, "draw", lambda *given: None)],
        "qkv": [(decoder, "_qkv", [of(qkv)] * shape.layers)],
        "o": [(layer.self_attn.o_proj, "forward", of(hidden)) for layer in layers],
        "gate_up": [(decoder, "_gated", dict.fromkeys(range(shape.layers), of(inner)))],
        "down": [(layer.mlp.down_proj, "forward", of(hidden)) for layer in layers],
    }
    with ExitStack() as stack:
        for part in parts:
            for place in places[part]:
                stack.enter_context(patch.object(*place))
        yield


def time_parts(llm: LLM, track: Track, rows: int) -> Point:
    """us of a step, of what leaving a part out saves, and of products alone."""
    runner: Any = llm.engine.runner
    texts(llm, [INPUT] * rows, OUTPUT)
    left_out = [(), *((each,) for each in (*SHARED, *PRODUCTS)), ("attention", "norms"), SHARED]
    runners = {}
    for parts in left_out:
        with without(runner, rows, parts):
            runners[" and ".join(parts)] = captured(track, lambda: runner._step(rows, False))
    us = timed(track, runners)
    decoder, count = runner.decoder, runner.shape.layers
    hidden, first = decoder.embed.weight.shape[1], decoder.layers[0]
    calls: dict[str, tuple[int, Callable[[int], Callable[[Tensor], object]]]] = {
        "qkv": (hidden, decoder.qkv),
        "o": (first.self_attn.o_proj.in_features, lambda i: decoder.layers[i].self_attn.o_proj),
        "gate_up": (hidden, decoder.gated),
        "down": (first.mlp.down_proj.in_features, lambda i: decoder.layers[i].mlp.down_proj),
    }
    alone, inputs = {}, []  # kept: graphs know their addresses
    for name, (k, product) in calls.items():
        inputs.append(x := torch.randn(rows, k, device=decoder.device).to(decoder.dtype))
        every = [functools.partial(product(i), x) for i in range(count)]
        alone[name] = Runner(track.capture(every, count), count)
    each = timed(track, alone)
    saved = {parts: round(us[""] - rest, 1) for parts, rest in us.items() if parts}
    products = us[" and ".join(SHARED)]
    return {
        "sequences": rows,
        "step_us": round(us[""], 1),
        "left_out_us": saved,
        "products_us_a_layer": round(products / count, 2),
        "alone_us": {name: round(value, 2) for name, value in each.items()},
    }


def captured(track: Track, step: Callable[[], object]) -> Runner:
    return Runner(track.capture([step], 1), 1)


def timed(track: Track, runners: Mapping[str, Runner]) -> dict[str, float]:
    times, _ = take_turns(track, runners, TURNS, TURN_SECONDS)
    return {name: statistics.median(each) for name, each in times.items()}


# -- kernels of another checkout


@contextmanager
def kernels_of(tree: Path) -> Iterator[None]:
    """w4a16's kernels come from the package `tree`, with their headers. Layers that are called
    inside take them; graphs keep them."""

    kernels = ("few_kernel", "normed_kernel", "batch_kernel", "panel_kernel")
    cached = [plan.plan, *(getattr(instances, name) for name in kernels)]
    here = tree / "schemes" / "w4a16" / "cuda"
    with ExitStack() as stack:
        for each in cached:
            each.cache_clear()
            stack.callback(each.cache_clear)
        stack.enter_context(patch.object(jit, "INCLUDE", tree / "kernels" / "include"))
        stack.enter_context(patch.object(instances, "HERE", here))
        yield


def time_against(
    llm: LLM, track: Track, other: Path, again: Callable[[], Any], batches: Sequence[int]
) -> list[Point]:
    """Two sets of graphs of each: where memory lies makes a difference, too."""
    runners, points = {}, []
    for name in ("ours", "theirs", "ours again", "theirs again"):
        with kernels_of(other) if name.startswith("theirs") else nullcontext():
            runners[name] = again()
    for rows in batches:
        written = []
        for runner in runners.values():
            llm.engine.runner = runner
            texts(llm, [INPUT] * rows, OUTPUT)
            written.append(runner.found[:rows, 0].tolist())
        graphs = {name: Runner(each.graphs[rows, False][0], 1) for name, each in runners.items()}
        us = {name: round(value, 1) for name, value in timed(track, graphs).items()}
        ratio = (us["ours"] + us["ours again"]) / (us["theirs"] + us["theirs again"])
        same = all(tokens == written[0] for tokens in written)
        point = {"sequences": rows, "us": us, "ratio": round(ratio, 4), "same_tokens": same}
        points.append(point)
    return points


# -- prompts beside decodes


class Watch:
    """Of each step of the engine: its tokens, and ms of the host without waiting and of the GPU."""

    def __init__(self, llm: LLM) -> None:
        self.steps: list[tuple[int, float, Any]] = []
        self._waited, self._tokens, self._marks = 0.0, 0, None
        cuda, drawn = llm.engine.decoder.device.type == "cuda", Decoded.drawn
        run, step = llm.engine.runner.run, llm.engine.step

        def watched_drawn(decoded: Decoded) -> Any:
            began = time.perf_counter()
            if decoded.landed is not None:
                decoded.landed.synchronize()
            self._waited += time.perf_counter() - began
            return drawn(decoded)

        def watched_run(pieces: Any, *given: Any) -> Any:
            self._tokens = sum(piece.count for piece in pieces)
            if not cuda:
                return run(pieces, *given)
            self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._marks[0].record()
            result = run(pieces, *given)
            self._marks[1].record()
            return result

        def watched_step() -> Any:
            self._tokens, self._waited, self._marks, began = 0, 0.0, None, time.perf_counter()
            result = step()
            if self._tokens:
                host = time.perf_counter() - began - self._waited
                self.steps.append((self._tokens, 1000 * host, self._marks))
            return result

        self._stack = ExitStack()
        self._stack.enter_context(patch.object(Decoded, "drawn", watched_drawn))
        self._stack.enter_context(patch.object(llm.engine.runner, "run", watched_run))
        self._stack.enter_context(patch.object(llm.engine, "step", watched_step))

    def close(self) -> None:
        self._stack.close()

    def of(self, tokens: int) -> Point:
        found = [(host, marks) for count, host, marks in self.steps if count == tokens]
        hosts = sorted(host for host, _ in found)
        gpu = [marks[0].elapsed_time(marks[1]) for _, marks in found if marks]
        return {
            "steps": len(found),
            "host_ms": round(statistics.median(hosts), 2) if hosts else None,
            "host_ms_one_of_ten": round(hosts[int(0.9 * len(hosts))], 2) if hosts else None,
            "gpu_ms": round(statistics.median(gpu), 2) if gpu else None,
        }


def time_prompts(llm: LLM, prompts: Mapping[str, Sequence[int]], rounds: int) -> list[Point]:
    """Steps in which DECODES sequences decode and all of these prompts are computed."""
    watch, tokens = Watch(llm), llm.max_model_len - INPUT
    decodes = threading.Thread(target=texts, args=(llm, [INPUT] * DECODES, tokens))
    points = []

    def go_on() -> None:
        if not decodes.is_alive():
            raise UserError(
                f"the {DECODES} decodes ended before the prompts: give more --tokens, or fewer "
                "--rounds."
            )

    try:
        decodes.start()
        while sum(count == DECODES for count, *_ in list(watch.steps)) < 20:
            go_on()
            time.sleep(0.01)
        for name, lengths in prompts.items():
            watch.steps.clear()
            for _ in range(rounds):
                go_on()
                texts(llm, lengths, 1)
            points.append({"prompts": name, **watch.of(DECODES + sum(lengths))})
    finally:
        decodes.join()
        watch.close()
    return points


# -- the run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("what", choices=("parts", "against", "prompts"))
    parser.add_argument("other", nargs="?", type=Path, help="of against: another checkout")
    parser.add_argument("--config", default="llama3-8b", help="as of bench generate")
    parser.add_argument("--batch", default="1,16", help="sequences, such as 1,2,4")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="steps with the same prompts")
    parser.add_argument("--tokens", type=int, default=4096, help="of a text beside prompts")
    parser.add_argument("--save", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("steps of the engine are graphs of a GPU, and PyTorch sees none here.")
    other = (args.other or Path()).resolve() / "billfish"
    if args.what == "against" and not (args.other and (other / "kernels" / "include").is_dir()):
        raise UserError(f"{other}: not another checkout's. Say: steps.py against CHECKOUT")
    config, rows = random_model.config_of(args.config), parse_rows(args.batch)
    if unknown := sorted({*rows} - {*buckets(max(rows))}):
        raise UserError(
            f"--batch {unknown[0]}: no graph of its own. Take 1, 2, 4, 8, 16, 24 or so."
        )
    track = Track(Rules())
    result = {
        "result_version": "steps 1",
        **circumstances(track.facts()),
        "command": shlex.join(["python", *sys.argv]),
        "points": [],
    }
    points: list[Point] = result["points"]
    if args.what == "prompts":
        with engine(config, track.device, args.tokens, DECODES + MOST_PROMPTS) as llm:
            points += time_prompts(llm, PROMPTS, args.rounds)
    else:
        size = max(rows)
        with noted() as given:
            made = engine(config, track.device, 3 * INPUT, size, pages=3 * size + 1)
        with made as llm:
            if args.what == "parts":
                points += [time_parts(llm, track, each) for each in rows]
            else:  # decode steps alone
                named = {**given[1], "budget": 0, "by_rows": False}
                again = functools.partial(GpuRunner, *given[0], **named)
                points += time_against(llm, track, other, again, rows)
    for point in points:
        print(point)
    if args.save:
        write(result, args.save)


@contextmanager
def noted() -> Iterator[list[Any]]:
    """What the engine gives its runner: positional arguments, and others."""
    given: list[Any] = []
    init = GpuRunner.__init__

    def note(runner: Any, *some: Any, **named: Any) -> None:
        given[:] = some, named
        init(runner, *some, **named)

    with patch.object(GpuRunner, "__init__", note):
        yield given


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
