"""Where w4a16 must work on a GPU: streams, graphs, torch.compile, QuantLinear, wrong input."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import linear
from w4a16_layers import (
    DEVICE,
    FP16,
    MISTAKES,
    SCHEMES,
    alike,
    every_class,
    every_dtype,
    judge,
    make,
    name,
    op_of,
    same,
    some_x,
)

from billfish.kernels.launch import plain_launches
from billfish.models.linear import QuantLinear
from billfish.schemes.registry import choose_op
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cuda.op import CudaOp

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled")]


# -- streams, graphs, compile


def test_on_a_side_stream(layer):
    """It waits for what its stream did before, and what follows waits for it."""
    op, _, _, k, dtype = layer
    for m in (1, 16, 65):
        late, x = some_x(m, k, dtype), torch.zeros(m, k, dtype=dtype, device=DEVICE)
        expected, side = op(late), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            x.copy_(late)
            y = op(x)
            kept = y.clone()
        side.synchronize()
        assert alike(kept, expected), m


def test_streams_at_once(layer):
    """Two streams run the same layer beside each other: they share no place to meet."""
    op, _, _, k, dtype = layer
    streams = [torch.cuda.Stream() for _ in range(3)]
    for m in (1, 16):
        x = [some_x(m, k, dtype) for _ in streams]
        expected = [op(each) for each in x]
        results = []
        torch.cuda.synchronize()
        for _ in range(20):
            for each, right, stream in zip(x, expected, streams, strict=True):
                with torch.cuda.stream(stream):
                    results.append((op(each) != right).sum())
        torch.cuda.synchronize()
        assert sum(map(int, results)) == 0, m


@every_class
def test_a_chain_of_layers(op_class):
    """Each launch depends on the one before, whose end it may not have seen (PDL)."""
    op, _ = op_of(op_class, W4A16(4, 64), 512, 512, FP16)
    x = some_x(4, 512, FP16)

    def chain():
        y = x
        for _ in range(50):
            y = op(y)
            y = y / y.abs().amax()
        z = x
        for _ in range(10):  # nothing in between: decode after decode
            z = op(z)
        return y, z

    with plain_launches():
        expected = chain()
    for _ in range(5):
        assert all(map(torch.equal, chain(), expected))


@every_dtype
@pytest.mark.parametrize("m", [8, 16, 32, 64, 200])
def test_a_chain_beside_library_products(dtype, m):
    """Where a kernel starts while the library's last one still runs, its loads take longest: a slot
    of the ring was once given back before they had ended."""
    layers = [op_of(CudaOp, W4A16(4, 128), 4096, 4096, dtype) for _ in range(4)]
    x, small = some_x(m, 4096, dtype), torch.zeros(256, device=DEVICE)
    dense = layers[0][1].to(dtype)
    with plain_launches():
        expected = [op(x) for op, _ in layers]
    linear(x, dense)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = []
        for _ in range(6):
            for i, (op, _) in enumerate(layers):
                linear(x, dense)
                results += [(op(x), expected[i]), (op(x), expected[i])]
                small.add_(1)
    for _ in range(100):
        graph.replay()
        assert all(torch.equal(y, right) for y, right in results)


@pytest.mark.parametrize("m", [1, 8, 16, 40, 100])
def test_graph_capture_and_replay(layer, m):
    op, _, n, k, dtype = layer
    x, bias = some_x(m, k, dtype), some_x(1, n, dtype)[0]
    op(x, bias)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        op(x, bias)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x, bias)
        twice = op(x)
    for _ in range(3):
        x.copy_(some_x(m, k, dtype))
        y.fill_(float("nan"))
        graph.replay()
        assert alike(y, op(x, bias)) and alike(twice, op(x))
    other = some_x(m, k, dtype)  # a replay and a plain call beside each other
    expected, beside = op(x), op(other)
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(side):
            graph.replay()
        plain = op(other)
        torch.cuda.synchronize()
        assert alike(twice, expected) and alike(plain, beside)


@every_class
def test_compile_traces_it_whole(shared, op_class):
    dtype = FP16
    op, weight = shared[op_class, "odd", dtype]
    n, k = weight.shape
    bias = some_x(1, n, dtype)[0]

    def model(x):
        return op(x, bias).relu() + op(x * 2)

    torch._dynamo.reset()
    traced = torch.compile(model, fullgraph=True, backend="aot_eager")
    for shape in ((1, k), (3, k), (2, 9, k), (100, k)):
        x = torch.randn(shape, device=DEVICE).to(dtype)
        assert alike(traced(x), model(x)), shape


# -- mistakes


def test_x_of_another_width(layer):
    op, _, _, k, dtype = layer
    for width in (k + 8, k - 1, 2 * k, 1):
        for leading in ((), (1,), (2,), (k,)):  # so that the numbers of elements fit by chance, too
            x = torch.zeros(*leading, width, device=DEVICE, dtype=dtype)
            with pytest.raises(MISTAKES, match=rf"\b{k}\b") as caught:
                op(x)
            assert str(width) in str(caught.value)


def test_x_of_another_type(layer):
    op, _, _, k, dtype = layer
    for x in (torch.zeros(2, k, device=DEVICE), torch.zeros(2, k, device=DEVICE).double()):
        with pytest.raises(MISTAKES, match=str(x.dtype).removeprefix("torch.")):
            op(x)
    assert op(some_x(1, k, dtype)).isfinite().all()  # and it still works


def test_refusals():
    assert CudaOp.refuses(W4A16(4, 128), 64, 256, DEVICE) is None
    assert "32" in CudaOp.refuses(W4A16(4, 16), 64, 256, DEVICE)
    assert CudaOp.refuses(W4A16(4, 128), 64, 256, torch.device("cpu"))
    assert choose_op(W4A16(4, 128), 64, 256, DEVICE) is CudaOp


# -- QuantLinear


@every_dtype
@pytest.mark.parametrize("scheme", [W4A16(4, 64), W4A16(8, 32, False)], ids=name)
def test_linear_moves_between_devices(scheme, dtype):
    n, k = 200, 576
    tensors = make(scheme, n, k, dtype)
    layer = QuantLinear(scheme, n, k, bias=True, dtype=dtype, device=DEVICE)
    layer.set_tensors(tensors)
    layer.bias.data = some_x(1, n, dtype)[0]
    x = some_x(5, k, dtype)
    y = layer(x)
    assert layer.op.name == "cuda"
    weight = scheme.dequantize(tensors)
    exact = x.double() @ weight.double().T + layer.bias.double()
    judge([(5, y, linear(x, weight.to(dtype), layer.bias), exact)], dtype)

    state = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    same({key: state[key] for key in tensors}, tensors)
    fresh = QuantLinear(scheme, n, k, bias=True, dtype=dtype, device=DEVICE)
    assert fresh.load_state_dict(state).missing_keys == []
    assert torch.equal(fresh(x), y)

    layer.to("cpu")
    assert layer.op.name == "cpu"
    same(layer.state_dict(), {key: tensor.cpu() for key, tensor in state.items()})
    layer.to(DEVICE)
    assert layer.op.name == "cuda"
    same(layer.state_dict(), state)
    assert torch.equal(layer(x), y)


# -- what is compiled, and what a call costs

WORKER = """
import torch
from billfish.kernels import jit
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cuda.op import CudaOp

def refuse(program, arch):
    raise SystemExit(f"programs() does not list {program.name}")

jit.compile = refuse
for bits, group, symmetric in SCHEMES:
    scheme = W4A16(bits, group, symmetric)
    for dtype in (torch.float16, torch.bfloat16):
        for n in (1, 64, 1024, 4096, 6144, 8192, 12800, 17000, 28672):
            k = 128
            groups = 1 if group == -1 else k // group
            codes = torch.zeros(n, k, dtype=torch.uint8, device="cuda")
            scales = torch.ones(n, groups, dtype=dtype, device="cuda")
            tensors = scheme.pack(codes, scales, codes[:, :groups])
            op = CudaOp(scheme, tensors)
            for m in (1, 9, 17, 65, 300):
                op(torch.ones(m, k, dtype=dtype, device="cuda"))
torch.cuda.synchronize()
print("all listed", flush=True)
for m in (1, 65):
    try:
        op(torch.ones(m, k, dtype=dtype))
        torch.cuda.synchronize()
    except Exception as error:
        print("x on the cpu:", type(error).__name__, str(error).splitlines()[0], flush=True)
"""


@pytest.fixture(scope="module")
def worker(compiled):
    """Another process with the cache of this one: it may compile nothing, and may break."""
    arguments = [(s.bits, s.group_size, s.symmetric) for s in SCHEMES]
    done = subprocess.run(
        [sys.executable, "-c", f"SCHEMES = {arguments}\n{WORKER}"],
        capture_output=True,
        text=True,
        env={**os.environ, "BILLFISH_CACHE_DIR": str(compiled)},
        timeout=300,
    )
    return done


def test_programs_lists_all_that_is_needed(worker):
    """What `billfish kernels warmup` compiles is enough."""
    assert worker.stdout.startswith("all listed\n"), worker.stderr[-2000:]


def test_x_in_another_place(worker):
    """Refused, with words: its address would mean nothing to a kernel, or kill the process."""
    told = worker.stdout.splitlines()[1:]
    assert len(told) == 2, worker.stderr[-2000:]
    for line in told:
        assert line.startswith("x on the cpu: ") and "cpu" in line.partition(": ")[2].lower()
        assert "illegal" not in line and "AcceleratorError" not in line, line


COST = """
import statistics, time, torch
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cuda.op import CudaOp

scheme, codes = W4A16(4, 128), torch.zeros(64, 128, dtype=torch.uint8, device="cuda")
scales = torch.ones(64, 1, dtype=torch.float16, device="cuda")
op = CudaOp(scheme, scheme.pack(codes, scales, torch.full_like(codes[:, :1], 8)))
x, times = torch.zeros(1, 128, dtype=torch.float16, device="cuda"), []
for i in range(1100):
    if i % 50 == 0:
        torch.cuda.synchronize()  # the queue never fills
    begin = time.perf_counter()
    op(x)
    times.append(time.perf_counter() - begin)
print(statistics.median(times[100:]) * 1e6)
"""


def test_what_a_call_costs(compiled, capsys):
    """Of the CPU's time, python and the launch, in a process of its own: after hundreds of tests a
    call takes half as long again."""
    done = subprocess.run(
        [sys.executable, "-c", COST],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "BILLFISH_CACHE_DIR": str(compiled)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    median = float(done.stdout)
    with capsys.disabled():
        print(f"\none call at 64 x 128: {median:.1f} us")
    assert median <= 12
