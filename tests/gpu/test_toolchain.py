"""The room of kernels on a real GPU: values, clusters, dependent launches, graphs, races."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from billfish.cli import doctor
from billfish.errors import UserError
from billfish.kernels import cache, jit
from billfish.kernels.device import gpu
from billfish.kernels.jit import Program
from billfish.kernels.launch import Kernel, plain_launches

pytestmark = pytest.mark.gpu

PROBE = Program(Path(jit.__file__).parent / "probe.cuh", "billfish::probe<3>")
# Unlike our sources these hold their PTX themselves: they judge the room, not the includes.
SOURCE = """
__global__ void clusters(int* out) {
  unsigned rank, count;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
  if (threadIdx.x == 0) out[blockIdx.y * gridDim.x + blockIdx.x] = rank * 1000 + count;
}

// Each launch adds one to every number, after a pause in which the next one may already be there.
__global__ void step(int* values, int count) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int before = values[i];
  for (int pause = 0; pause < 20; ++pause) __nanosleep(100);
  values[i] = before + 1;
}

__global__ void arguments(double* out, signed char a, short b, int c, long long d, bool e,
                          float f, double g, unsigned h) {
  const double values[] = {double(a), double(b), double(c), double(d), double(e), double(f), g,
                           double(h)};
  for (int i = 0; i < 8; ++i) out[i] = values[i];
}

__global__ void reverse(float* out, const float* in, int count) {
  extern __shared__ float row[];
  for (int i = threadIdx.x; i < count; i += blockDim.x) row[i] = in[i];
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) out[i] = row[count - 1 - i];
}
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("BILLFISH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_memory", {})


@pytest.fixture
def kernel(tmp_path):
    path = tmp_path / "toolchain.cuh"
    path.write_text(SOURCE)
    return lambda name: Kernel(Program(path, name))


def check_probe(loaded, device="cuda"):
    x = torch.arange(1000, dtype=torch.float32, device=device)
    y = torch.full_like(x, -1)
    loaded.launch(8, 128, (y.data_ptr(), x.data_ptr(), 990))
    expected = torch.full((1000,), -1.0)
    expected[:990] = 4 * torch.arange(990)
    assert torch.equal(y.cpu(), expected)


def test_probe():
    loaded = Kernel(PROBE).load()
    check_probe(loaded)
    # The driver may count in the units that registers are given out in.
    assert 0 <= loaded.attributes.registers - loaded.cubin.registers < 8
    assert loaded.attributes.local_bytes == 0 and loaded.attributes.max_threads >= 128


def test_doctor_agrees():
    assert doctor.check_cuda_kernels().status == "ok" and doctor.check_nvrtc().status == "ok"


def test_on_the_current_stream():
    """The launch waits for what its stream did before, and not only by luck."""
    loaded, side = Kernel(PROBE).load(), torch.cuda.Stream()
    x = torch.zeros(1 << 20, device="cuda")
    y = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(2)
        loaded.launch(len(x) // 128, 128, (y.data_ptr(), x.data_ptr(), len(x)))
        total = y.double().sum()
    side.synchronize()
    assert total.item() == 6 * len(x) + len(x) * (len(x) - 1) / 2


def test_in_a_thread_that_has_not_met_cuda():
    loaded = Kernel(PROBE).load()
    x = torch.ones(128, device="cuda")
    y = torch.zeros_like(x)
    torch.cuda.synchronize()
    arguments = (y.data_ptr(), x.data_ptr(), 128)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loaded.launch, 1, 128, arguments).result()
    assert y.tolist() == [3.0 + i for i in range(128)]


def test_arguments(kernel):
    out = torch.zeros(8, dtype=torch.float64, device="cuda")
    values = (-5, -300, -(2**31), 2**40, True, np.float32(0.1), np.float64(0.1), 2**32 - 1)
    kernel("arguments").load().launch(1, 1, (out.data_ptr(), *values))
    assert out.tolist() == [float(value) for value in values]


def test_clusters_and_grids_of_blocks(kernel):
    loaded = kernel("clusters").load()
    for cluster in (1, 2, 4, 8, 16):
        out = torch.full((3, 32), -1, dtype=torch.int32, device="cuda")
        loaded.launch((32, 3), 64, (out.data_ptr(),), cluster=cluster)
        row = [(i % cluster) * 1000 + 32 // cluster for i in range(32)]
        assert out.tolist() == [row] * 3, cluster
    few, many = (loaded.max_active_clusters(64, 200 * 1024, size) for size in (8, 2))
    assert 1 <= few < many <= gpu().sms
    assert loaded.max_active_clusters(64, 0, 2) > many


def test_shared_memory_up_to_the_limit(kernel):
    loaded = kernel("reverse").load()
    assert loaded.most_smem == gpu().smem_per_block
    count = loaded.most_smem // 4
    x = torch.rand(count, device="cuda")
    y = torch.zeros_like(x)
    loaded.launch(1, 256, (y.data_ptr(), x.data_ptr(), count), smem=4 * count)
    assert torch.equal(y, x.flip(0))
    with pytest.raises(ValueError, match="shared memory"):
        loaded.launch(1, 256, (y.data_ptr(), x.data_ptr(), count), smem=4 * count + 4)


def test_dependent_launches(kernel):
    loaded = kernel("step").load()
    values = torch.zeros(4096, dtype=torch.int32, device="cuda")
    for _ in range(50):
        loaded.launch(32, 128, (values.data_ptr(), 4096), pdl=True)
    with plain_launches():
        for _ in range(50):
            loaded.launch(32, 128, (values.data_ptr(), 4096), pdl=True)
    assert values.unique().tolist() == [100]


@pytest.mark.parametrize("pdl", [False, True])
def test_a_graph_of_launches(kernel, pdl):
    loaded = kernel("step").load()  # loaded and never launched: the capture is the first time
    values = torch.zeros(4096, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            loaded.launch(32, 128, (values.data_ptr(), 4096), pdl=pdl)
    assert values.unique().tolist() == [0]
    for _ in range(5):
        graph.replay()
    assert values.unique().tolist() == [50]


def test_nothing_is_loaded_in_a_capture(kernel):
    late, graph = Kernel(PROBE), torch.cuda.CUDAGraph()
    loaded = kernel("step").load()
    values = torch.zeros(128, dtype=torch.int32, device="cuda")
    with torch.cuda.graph(graph):
        with pytest.raises(UserError, match="before the capture"):
            late.load()
        loaded.launch(1, 128, (values.data_ptr(), 128))
    graph.replay()  # the refusal did not spoil the capture
    assert values.unique().tolist() == [1]
    check_probe(late.load())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_device_that_is_not_current():
    kernel = Kernel(PROBE)
    assert torch.cuda.current_device() == 0
    for index in (1, 0):
        check_probe(kernel.load(index), f"cuda:{index}")
    assert torch.cuda.current_device() == 0


WORKER = """
import sys
from pathlib import Path
import torch
from billfish.kernels import jit
from billfish.kernels.launch import Kernel
torch.cuda.init()
print("ready", flush=True)
sys.stdin.readline()
x = torch.ones(256, device="cuda")
for factor in range(1, 6):
    name = f"billfish::probe<{factor}>"
    kernel = Kernel(jit.Program(Path(jit.__file__).parent / "probe.cuh", name))
    y = torch.zeros_like(x)
    kernel.load().launch(2, 128, (y.data_ptr(), x.data_ptr(), 256))
    print(y.sum().item())
"""


def test_two_processes_and_one_cache(tmp_path):
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "error::RuntimeWarning", "-c", WORKER],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "BILLFISH_CACHE_DIR": str(tmp_path / "shared")},
        )
        for _ in range(2)
    ]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:  # both begin with an empty cache at the same moment
        worker.stdin.write("go\n")
        worker.stdin.flush()
    base = 255 * 256 / 2
    for worker in workers:
        out, said = worker.communicate(timeout=120)
        assert worker.returncode == 0, said
        assert [float(line) for line in out.split()] == [base + 256 * i for i in range(1, 6)]
    assert len(list((tmp_path / "shared" / "cubin").iterdir())) == 5
