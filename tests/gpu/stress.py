"""Tens of thousands of w4a16 products on a busy GPU, each compared bit by bit with the first result
of the same call. A program, run by hand:

    python tests/gpu/stress.py --launches 30000

First results are computed alone, and judged as in test_w4a16.py. Then another process keeps the GPU
busy with matrix products and copies, and calls are drawn at random, in bursts whose dependent
launches overlap.
"""

import argparse
import itertools
import multiprocessing
import random
import sys
import time

import torch
from torch.nn.functional import linear
from w4a16_layers import BF16, DEVICE, FP16, judge, name, op_of, some_x, takes

from billfish.schemes import registry
from billfish.schemes.w4a16 import W4A16

SHAPES = (  # n, k
    (4096, 4096),
    (6144, 4096),
    (4096, 14336),
    (28672, 4096),
    (5120, 5120),
    (576, 1536),
    (200, 576),  # tails of n and of k; no groups of 128
)
ROWS = (1, 8, 16, 17, 64, 200, 1024)
SCHEMES = [W4A16(4, group, symmetric) for group in (32, 64, 128) for symmetric in (True, False)]
BURST = 8  # products without another kernel between them
ROUND = 2000  # launches between two looks at the clock
BESIDE = 50  # products and copies of the other process between two of its own


def occupy(rounds):
    """What the second process does, until it is ended; counts rounds."""
    a, b = (torch.randn(4096, 4096, device=DEVICE).half() for _ in range(2))
    source = torch.zeros(2**28, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    while True:
        for _ in range(BESIDE):
            a @ b
            target.copy_(source)
        torch.cuda.synchronize()
        rounds.value += 1


class Case:
    """One call: a layer at one m, and the bits of its first result."""

    def __init__(self, op, x, called, place):
        self.op, self.x, self.called, self.place = op, x, called, place
        self.first = bits(op(x))
        self.launches = 0


def bits(y):
    return y.view(torch.int16)  # NaN equals itself


def cases():
    inputs = {(k, dtype): some_x(max(ROWS), k, dtype) for _, k in SHAPES for dtype in (FP16, BF16)}
    found = []
    for dtype, scheme, (n, k) in itertools.product((FP16, BF16), SCHEMES, SHAPES):
        if takes(scheme, k):
            op, weight = op_of(registry.choose_op(scheme, n, k, DEVICE), scheme, n, k, dtype)
            for m in ROWS:
                called = f"{name(scheme)} {str(dtype)[6:]} {n} x {k} m = {m}"
                x = inputs[k, dtype][:m]
                found.append(Case(op, x, called, len(found)))
                exact, theirs = x.double() @ weight.double().T, linear(x, weight.to(dtype))
                judge([(m, op(x), theirs, exact)], dtype)
    return found


def run(found, launches, chance):
    """How many launches of each case differed. Counted on the GPU, which is not waited for."""
    different = torch.zeros(len(found), dtype=torch.int64, device=DEVICE)
    began = time.monotonic()
    for at in range(0, launches, BURST):
        drawn = chance.choices(found, k=min(BURST, launches - at))
        results = [case.op(case.x) for case in drawn]
        for case, y in zip(drawn, results, strict=True):
            different[case.place] += (bits(y) != case.first).any()
            case.launches += 1
        if at // ROUND != (at + BURST) // ROUND:
            torch.cuda.synchronize()
            print(f"{at + len(drawn)} launches, {time.monotonic() - began:.0f} s", flush=True)
    return different.tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--launches", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    began = time.monotonic()
    for dtype in (FP16, BF16):
        registry.compile_kernels(SCHEMES, dtype, DEVICE)
    print(f"kernels: {time.monotonic() - began:.0f} s", flush=True)
    with torch.inference_mode():
        found = cases()
        torch.cuda.synchronize()
        print(f"{len(found)} first results: {time.monotonic() - began:.0f} s", flush=True)
        spawn = multiprocessing.get_context("spawn")
        rounds = spawn.Value("q", 0)
        other = spawn.Process(target=occupy, args=(rounds,), daemon=True)
        other.start()
        try:
            while rounds.value == 0 and other.is_alive():
                time.sleep(0.05)
            before = rounds.value
            different = run(found, args.launches, random.Random(args.seed))
            busy = rounds.value - before if other.is_alive() else 0
        finally:
            other.kill()
            other.join()
    bad = [(case, count) for case, count in zip(found, different, strict=True) if count]
    for case, count in bad:
        print(f"DIFFERENT: {case.called}: {count} of {case.launches} launches")
    print(
        f"{args.launches} launches of {len(found)} cases: {sum(different)} differed, "
        f"in {len(bad)} cases; beside them {BESIDE * busy} products and copies of another process"
    )
    if not busy:
        print("the other process did not run: this was no test")
    return 1 if bad or not busy else 0


if __name__ == "__main__":
    sys.exit(main())
