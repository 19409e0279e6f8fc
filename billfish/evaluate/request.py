"""An evaluation's request, checked before a model is loaded, and what is recorded about its run.

Wrong names, missing files and bad rows are found here, not after an hour of work.
"""

import hashlib
import importlib.metadata
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from billfish.checkpoints.config import read_json
from billfish.checkpoints.unfinished import unfinished
from billfish.errors import UserError
from billfish.evaluate.tasks import (
    TASKS,
    TextTask,
    check_harness,
    check_names,
    read_rows,
    task_bytes,
    task_of,
)
from billfish.models import compute

DTYPES = ("auto", *compute.DTYPES)


@dataclass(frozen=True)
class EvalRequest:
    model: str | Path
    tasks: tuple[str, ...] = ("sample",)
    baseline: str | Path | None = None
    kl: bool = False  # also KL(baseline || model) on every text task; holds both models in memory
    data_dir: str | Path | None = None
    limit: int | None = None  # samples of a zero-shot task, windows of a text
    seqlen: int | None = None  # None: 2048, or what model and baseline can take
    dtype: str = "auto"  # of both models; auto: by the stored dtype and the device
    device: str = "cpu"
    batch_size: int = 4  # zero-shot requests per forward
    command: str | None = None  # as the user typed it, for the report

    @property
    def texts(self) -> list[str]:
        return [name for name in self.tasks if isinstance(task_of(name), TextTask)]

    @property
    def zero_shot(self) -> list[str]:
        return [name for name in self.tasks if name not in self.texts]


def check_request(request: EvalRequest) -> None:
    """Raises UserError if the request cannot be run."""
    if not request.tasks:
        raise UserError(f"no task was given. Tasks: {', '.join(TASKS)}.")
    check_names(request.tasks)
    if len(set(request.tasks)) != len(request.tasks):
        raise UserError(f"tasks {', '.join(request.tasks)}: each can be given once.")
    for what, number, least in (
        ("limit", request.limit, 1),
        ("batch size", request.batch_size, 1),
        ("seqlen", request.seqlen, 2),
    ):
        if number is not None and number < least:
            raise UserError(f"{what} {number}: it must be {least} or more.")
    if request.dtype not in DTYPES:
        raise UserError(f"dtype {request.dtype!r} is not one of {', '.join(DTYPES)}.")
    compute.device_of(request.device)
    if request.kl and request.baseline is None:
        raise UserError("KL compares a model with its baseline, and no baseline was given.")
    if request.kl and not request.texts:
        raise UserError(
            f"KL is measured on a text, and the tasks are {', '.join(request.tasks)}. "
            "Add wikitext2 or sample."
        )
    for role, path in (("model", request.model), ("baseline", request.baseline)):
        if path is not None and not (Path(path) / "config.json").is_file():
            raise UserError(
                unfinished(Path(path))
                or f"{role} {path}: there is no config.json. Give the directory of a checkpoint, "
                "with config.json, tokenizer files and *.safetensors."
            )
    for name in request.zero_shot:
        check_harness()
        read_rows(name, request.data_dir, request.limit)


def data_hashes(request: EvalRequest) -> list[dict[str, Any]]:
    return [
        {
            "task": name,
            "file": task_of(name).file or "sample_eval.txt",
            "sha256": hashlib.sha256(task_bytes(name, request.data_dir)).hexdigest(),
        }
        for name in request.tasks
    ]


def read_quantization_report(model: str | Path) -> dict[str, Any] | None:
    """The file that `quantize` wrote beside the weights; None if there is none."""
    path = Path(model) / "quantization_report.json"
    if not path.exists():
        return None
    try:
        return read_json(path)
    except UserError as error:
        raise UserError(f"{error} Quantize again to write it anew, or remove it.") from None


def bytes_on_disk(path: str | Path) -> int:
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def package_versions(request: EvalRequest) -> dict[str, str]:
    found = {"python": platform.python_version()}
    packages = ["torch", "transformers", "billfish"] + (["lm-eval"] if request.zero_shot else [])
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from a source tree
            found[package] = "not installed as a package"
    return found
