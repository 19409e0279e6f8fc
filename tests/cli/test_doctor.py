"""doctor under conditions that this machine does not have; every problem has a fix."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from billfish.cli import doctor
from billfish.cli.doctor import Finding, Package, diagnose, release
from billfish.errors import UserError
from billfish.kernels.device import Gpu
from billfish.kernels.jit import CompileError
from billfish.kernels.launch import LoadError

INTEL = """processor\t: 0
model name\t: Some Xeon
flags\t\t: fpu avx2 avx512f amx_bf16
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("BILLFISH_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "nothing")


def versions(monkeypatch, **known):
    """What is installed; a name that is not given is not."""
    monkeypatch.setattr(doctor, "installed", lambda name: known.get(name.replace("-", "_")))


def test_here():
    """The machine the tests run on can run them."""
    found = diagnose()
    assert all(isinstance(finding, Finding) for finding in found)
    assert {"python", "torch", "transformers", "cpu", "gpu", "kernels", "cache"} <= {
        f.name for f in found
    }
    assert [f.name for f in found if f.status == "problem" and f.name != "cache"] == []
    assert all(f.fix for f in found if f.status == "problem")


def test_everything_is_wrong_and_has_a_fix(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BILLFISH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.10.4")
    versions(monkeypatch, torch="2.9.1+cu128", transformers="4.57.0")
    found = {finding.name: finding for finding in diagnose()}
    problems = [finding for finding in found.values() if finding.status == "problem"]
    names = {"python", "torch", "transformers", "safetensors", "cpu kernels", "cache"}
    assert {finding.name for finding in problems} == names
    assert all(finding.fix for finding in problems)
    assert "not a directory" in found["cache"].detail
    assert "2.9.1+cu128" in found["torch"].detail and "2.10" in found["torch"].fix
    assert "config.json" in found["transformers"].detail


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.9.9", "problem"),
        ("2.10.0", "note"),
        ("2.11.0", "ok"),
        ("2.13.1+cpu", "ok"),
        ("2.14.0a0", "note"),
        ("3.0", "note"),
        (None, "problem"),
    ],
)
def test_versions(version, status, monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda name: version)
    assert doctor.check_package(Package("torch", "2.10", ("2.11", "2.13"))).status == status


def test_release():
    assert str(release("2.13.0+cpu")) == "2.13.0"
    assert str(release("5.3.0.dev0")) == "5.3.0"


def test_extras(monkeypatch):
    versions(monkeypatch, pyarrow="26.0.1")
    assert doctor.check_extra("pyarrow").status == "ok"
    missing = doctor.check_extra("lm-eval")
    assert (missing.status, missing.fix) == ("note", "pip install 'billfish[eval]'")


# -- processor


def test_cpu(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text(INTEL)
    monkeypatch.setattr(doctor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    found = doctor.check_cpu()
    assert found.status == "ok"
    assert found.detail == "Some Xeon; has AVX2, AVX512, AMX-BF16; PyTorch uses AVX512"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    found = doctor.check_cpu()
    assert found.status == "note" and "ATEN_CPU_CAPABILITY" in found.fix
    monkeypatch.setattr(doctor, "CPUINFO", tmp_path / "nothing")
    assert doctor.check_cpu().detail


def test_threads(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(doctor, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert doctor.check_threads().status == "ok"
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert doctor.check_threads().status == "ok"
    (tmp_path / "cpu.max").write_text("200000 100000\n")  # a container of two cores
    found = doctor.check_threads()
    assert (found.status, found.fix) == ("note", "export OMP_NUM_THREADS=2")
    (tmp_path / "cpu.max").unlink()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP_NUM_THREADS is 1" in doctor.check_threads().detail


@pytest.mark.parametrize(
    ("name", "status"), [("avx512vnni", "ok"), ("dotprod", "ok"), ("plain", "note")]
)
def test_cpu_kernels(name, status, monkeypatch):
    monkeypatch.setattr(doctor.cpu, "isa", lambda: doctor.cpu.ISAS[name])
    found = doctor.check_cpu_kernels()
    assert found.status == status and name in found.detail


def test_no_cpu_kernels(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda name: None)
    found = doctor.check_cpu_kernels()
    assert found.status == "problem" and found.fix == "pip install llvmlite"


# -- GPU


def test_no_gpu(no_gpu, monkeypatch):
    monkeypatch.setattr(doctor, "ops_of", lambda scheme: pytest.fail("no GPU to ask them about"))
    found = doctor.check_gpu()
    assert (found.status, found.fix) == ("ok", None) and found.detail.startswith("none")


def test_driver_but_cpu_build(no_gpu, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.version, "cuda", None)
    found = doctor.check_gpu()
    assert found.status == "note" and "CPU-only build" in found.detail and found.fix
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = doctor.check_gpu()
    assert "finds no device" in found.detail and "CUDA_VISIBLE_DEVICES" in found.fix


@pytest.fixture
def h100(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    known = Gpu(0, "NVIDIA H100", "sm_90a", 132, 232448, 233472, 50 * 2**20)
    monkeypatch.setattr(doctor, "gpu", lambda: known)


def test_gpu_and_its_kernels(h100, monkeypatch):
    asked = []

    def answers(reason):
        def refuses(scheme, n, k, device):
            asked.append(device)
            return reason

        op = SimpleNamespace(refuses=refuses)
        monkeypatch.setattr(doctor, "ops_of", lambda scheme: (op, None))  # the reference is last

    answers("it is old.")
    found = doctor.check_gpu()
    assert "NVIDIA H100, compute capability 9.0, 80 GiB; 2 in all." in found.detail
    assert found.status == "note" and "models run on the CPU" in found.detail
    answers(None)
    found = doctor.check_gpu()
    assert found.status == "ok" and "CPU" not in found.detail
    assert asked == [torch.device("cuda")] * 2 * len(doctor.SCHEMES)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (10, 0))
    found = doctor.check_gpu()
    assert found.status == "note" and "through PyTorch's" in found.detail


def test_kernels_without_a_gpu(no_gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("BILLFISH_CACHE_DIR", str(tmp_path / "cache"))
    found = doctor.check_cuda_kernels()
    assert found.status == "ok" and "compile (sm_90a" in found.detail and "no GPU" in found.detail
    assert not (tmp_path / "cache").exists()  # doctor only looks

    def gone(program, arch):
        raise UserError("NVRTC is not here (libnvrtc). pip install 'billfish[cuda]'")

    monkeypatch.setattr(doctor.jit, "compile", gone)
    found = doctor.check_cuda_kernels()
    assert (found.status, found.fix) == ("note", "pip install 'billfish[cuda]'")


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (
            CompileError("probe does not compile for sm_90a:\nnvrtc: error"),
            "NVRTC that knows sm_90a",
        ),
        (LoadError("does not load it (no kernel image)"), "580"),
        (UserError("cuda-core cannot be imported"), "billfish[cuda]"),
        (RuntimeError("CUDA error: out of memory"), "nvidia-smi"),
    ],
)
def test_kernels_that_do_not_run(h100, monkeypatch, error, fix):
    def fail(cubin):
        raise error

    monkeypatch.setattr(doctor, "run_probe", fail)
    found = doctor.check_cuda_kernels()
    assert found.status == "problem" and fix in found.fix and "\n" not in found.detail


def test_kernels_that_run(h100, monkeypatch):
    cubins = []
    monkeypatch.setattr(doctor, "run_probe", cubins.append)
    found = doctor.check_cuda_kernels()
    assert found.status == "ok" and "compute right" in found.detail
    assert cubins[0].symbol == "_ZN8billfish5probeILi3EEEvPfPKfi"
    monkeypatch.setattr(doctor, "run_probe", lambda cubin: "7 of 1000 numbers are wrong.")
    found = doctor.check_cuda_kernels()
    assert found.status == "problem" and "7 of 1000" in found.detail and found.fix


def fake_nvrtc(monkeypatch, answer):
    monkeypatch.setattr(doctor, "importable", lambda name: True)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", SimpleNamespace(nvrtcVersion=answer))


def test_nvrtc(monkeypatch):
    fake_nvrtc(monkeypatch, lambda: (0, 13, 1))
    assert doctor.check_nvrtc() == Finding("nvrtc", "ok", "13.1")

    def gone():
        raise RuntimeError("Failure finding libnvrtc.so\nsearched everywhere")

    fake_nvrtc(monkeypatch, gone)
    found = doctor.check_nvrtc()
    assert found.status == "note" and "libnvrtc.so)" in found.detail and found.fix
    monkeypatch.setattr(doctor, "importable", lambda name: name == "cuda.bindings")
    found = doctor.check_nvrtc()
    assert found.detail.startswith("cuda.core not installed") and "billfish[cuda]" in found.fix


def test_importable():
    assert doctor.importable("json.decoder")
    assert not doctor.importable("nothing_like.that")


# -- directories


def test_cache(monkeypatch, tmp_path):
    place = tmp_path / "deep" / "cache"
    monkeypatch.setenv("BILLFISH_CACHE_DIR", str(place))
    assert doctor.check_cache().status == "ok" and not place.parent.exists()
    place.mkdir(parents=True)
    place.chmod(0o700)
    assert doctor.check_cache().status == "ok"
    place.chmod(0o777)
    found = doctor.check_cache()
    assert found.status == "note" and "chmod 700" in found.fix
    place.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: place.stat().st_uid + 1)
    assert "belongs to user" in doctor.check_cache().detail
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = doctor.check_cache()
    assert found.status == "problem" and "BILLFISH_CACHE_DIR" in found.fix


def test_disk(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=5 * 10**8))
    found = doctor.check_disk()
    assert found.status == "note" and found.fix
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=5 * 10**10))
    assert doctor.check_disk().status == "ok" and "50.0 GB" in doctor.check_disk().detail


def test_hub(monkeypatch):
    assert doctor.check_hub().status == "ok"
    monkeypatch.setenv("HF_HOME", "/data/hf")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = doctor.check_hub()
    assert found.status == "note" and "/data/hf" in found.detail and found.fix
