"""The offline driver: reads, calibrates block by block, quantizes, writes, resumes.

It holds one block, its statistics and the calibration activations, never the whole model. After a
block, its shard, its report and (not after every block) its output activations are on disk under
their final names. A job killed at any moment resumes from the last saved activations and ends with
the same bytes as a job that was never stopped.

    out/model-00001-of-000NN.safetensors   tensors outside the blocks
    out/model-0000i-of-000NN.safetensors   block i - 2; the last one a packed head
    out/.billfish/                         while the job runs: settings, reports, activations
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from billfish.checkpoints import write as files
from billfish.checkpoints.config import read_json
from billfish.checkpoints.read import Checkpoint
from billfish.checkpoints.tensors import COPIED, write_tensors
from billfish.checkpoints.unfinished import JOB, SETTINGS
from billfish.errors import UserError
from billfish.formats.spec import first_nonfinite
from billfish.models.blocks import Arguments
from billfish.models.compute import name_of
from billfish.offline.activations import Activations
from billfish.offline.block import BlockJob
from billfish.offline.distill import distill
from billfish.offline.head import solve_head
from billfish.offline.kv import write_kv_file
from billfish.offline.progress import OnProgress, Reporter
from billfish.offline.report import REPORT, layer_entry, make_report
from billfish.offline.request import QuantizeRequest
from billfish.offline.sentinel import check
from billfish.offline.streaming import BackgroundWriter, return_freed_memory
from billfish.offline.task import Task
from billfish.offline.text import Calibration
from billfish.schemes.base import Solved
from billfish.solvers.refining import Gain

TRAINED = "end-to-end.safetensors"  # tensors that distillation changed
CHECKED = "check.json"  # what the sentinel found
# Tokens of a batch in the calibration passes. On a CPU this many give matrix products their full
# speed while elementwise operations still fit in cache; a GPU needs more to be busy.
TOKENS = {"cpu": 1024, "cuda": 16384}


def quantize(
    request: QuantizeRequest, resume: bool = True, on_progress: OnProgress | None = None
) -> dict[str, Any]:
    """Quantize a checkpoint directory into `request.output`; returns the report.

    With `resume` an unfinished job of the same request continues, the report of a finished one is
    returned, and any other output directory that is not empty is refused. Without it the job starts
    over: what Billfish wrote there is deleted.
    """
    started = time.monotonic()
    if request.output is None:
        raise UserError("quantize: no output directory is given.")
    task = Task(request, Checkpoint(request.model))
    job = Job(task, request.output)
    data = task.read_calibration()  # raises before anything is written
    if not job.open(resume):
        job.run(data, on_progress or (lambda progress: None))
    report = read_json(request.output / REPORT)
    return {
        **report,
        "seconds": round(time.monotonic() - started, 1),
        "output": str(request.output),
    }


class Job:
    """Runs a task and writes its output directory."""

    def __init__(self, task: Task, output: Path) -> None:
        self.task, self.output, self.state = task, output, output / JOB
        self.request, self.model, self.device = task.request, task.model, task.device
        self.scheme, self.stored_dtype = task.scheme, task.stored_dtype
        self.shards = len(task.model.blocks) + (1 if task.head is None else 2)
        self.placed = task.placed
        self.copied = {name for name, each in self.placed.items() if each.how == COPIED}

    # -- resuming

    def open(self, resume: bool) -> bool:
        """Create the output directory, or check that the one there can be resumed; True if that one
        is finished."""
        manifest, report = self.output / files.MANIFEST, self.output / REPORT
        ours, finished = (self.state / SETTINGS).exists(), manifest.exists()
        if not resume and self.output.exists():
            if not (ours or finished or not any(self.output.iterdir())):
                raise UserError(
                    f"{self.output}: was not made by Billfish; --fresh will not delete it. "
                    "Choose another --output."
                )
            proofs = (
                manifest,
                self.state,
            )  # deleted last: a --fresh that was stopped can be repeated
            for path in sorted(self.output.iterdir(), key=lambda path: path in proofs):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        elif finished and report.exists():
            self.task.same_job(read_json(report).get("fingerprint", {}), self.output)
            shutil.rmtree(
                self.state, ignore_errors=True
            )  # left by a job killed right after its manifest
            return True
        elif ours:
            self.task.same_job(read_json(self.state / SETTINGS), self.output)
            for leftover in self.output.rglob("*" + files.TEMPORARY):
                leftover.unlink()
            return False
        elif self.output.exists() and not self._untouched():
            raise UserError(
                f"{self.output}: exists, and holds no job of Billfish. Choose another --output; "
                "--fresh deletes what Billfish made, and nothing else."
            )
        shutil.rmtree(self.state, ignore_errors=True)
        self.state.mkdir(parents=True)
        files.write_json(self.state / SETTINGS, self.task.fingerprint())
        return False

    def _untouched(self) -> bool:
        """Whether the directory is empty but for a job that died before it wrote its settings."""
        return self.output.is_dir() and all(path == self.state for path in self.output.iterdir())

    # -- running

    def run(self, data: Calibration | None, on_progress: OnProgress) -> None:
        first, blocks = self._first_block(), len(self.model.blocks)
        activations, arguments = self._activations_before(first, data)
        if not self._shard(0).exists():
            self._write_outside()
        self.model.model.eval()
        return_freed_memory()
        report = Reporter(self.task, 0 if data is None else data.tokens, on_progress)
        with BackgroundWriter(synchronous=self.device.type == "cpu") as writes:
            for index in range(first, blocks):
                write, gain = self._run_block(index, activations, arguments, report)
                last = index + 1 == blocks
                writes(partial(write, self._goes_on if last else writes.accepts_large))
                del write  # it holds the activations
                return_freed_memory()
                report.block(index, gain)
        self._quantize_head(activations, report)
        activations.quantized.clear()  # distillation needs the original's
        if self._distills and data is not None:
            self._distill(data, activations.original, report)
        activations.original.clear()
        if self.request.check:
            self._check(report)
        self._finish(data)

    def _first_block(self) -> int:
        """The block to start with: the first unfinished one, or an earlier one if the activations
        before it were not saved."""
        blocks = len(self.model.blocks)
        ready = next((i for i in range(blocks) if not self._block_report(i).exists()), blocks)
        done = ready == blocks and not self._goes_on
        if done or not self.request.how.needs_data:
            return ready
        return max((index for index in Activations.saved(self.state) if index <= ready), default=0)

    def _activations_before(
        self, first: int, data: Calibration | None
    ) -> tuple[Activations, Arguments | None]:
        """Inputs of block `first`, computed from the embeddings or saved by the stopped job, and
        the other arguments of the blocks."""
        if data is None or first == len(self.model.blocks):
            known = Activations.saved(self.state)
            if first in known:
                return Activations.load(self.state, first, self.device), None
            return Activations([]), None
        quantized, arguments = self.model.first_inputs(data.batches(TOKENS[self.model.device.type]))
        if first:
            return Activations.load(self.state, first, self.device), arguments
        original = list(quantized) if self.request.how.follows_original else []
        return Activations(quantized, original), arguments

    def _run_block(
        self,
        index: int,
        activations: Activations,
        arguments: Arguments | None,
        report: Reporter,
    ) -> tuple[Callable[[bool], None], Gain | None]:
        """Quantize one block. Returns a function that writes its shard and report and, if called
        with True, its output activations; and what training gained."""
        request, model = self.request, self.model
        prefix = model.block_prefix(index)
        model.fill(prefix)
        linears = {linear.path: linear for linear in model.linears(index)}
        paths = [path for path in linears if prefix + path not in self.task.skipped]
        packed: dict[str, Tensor] = {}
        quantized: set[str] = set()
        layers: list[dict[str, Any]] = []

        def collect(path: str, solved: Solved) -> None:
            linear = linears[path]
            module = linear.weight.removesuffix(".weight")
            quantized.add(linear.weight)
            tensors = solved.tensors()
            packed.update({f"{module}.{name}": tensor.cpu() for name, tensor in tensors.items()})
            layers.append(
                layer_entry(self.task, self.scheme, prefix + path, linear.n, linear.k, solved)
            )
            report.linear(index, prefix + path, solved)

        job = BlockJob(
            model,
            index,
            paths,
            self.scheme,
            request.how,
            self.stored_dtype,
            arguments,
            request.training_steps,
            request.seed,
            partial(report.step, index),
        )
        with torch.no_grad():
            gain = job.solve(activations, collect)
        tensors = self._block_tensors(index, packed, quantized)
        outputs = activations.copy()
        model.drop(prefix)

        def write(save: bool) -> None:
            files.write_shard(self._shard(index + 1), tensors)
            older = Activations.saved(self.state)
            if save and arguments is not None:
                outputs.save(self.state, index + 1)
            trained = None if gain is None else {"block": index, **asdict(gain)}
            files.write_json(self._block_report(index), {"layers": layers, "gain": trained})
            if save:
                for path in older.values():
                    path.unlink()

        return write, gain

    # -- the head and distillation

    def _quantize_head(self, activations: Activations, report: Reporter) -> None:
        head = self.task.head
        if head is None or self._head_report.exists():
            return
        solved = solve_head(self.task, head, activations)
        tensors = {f"{head.module}.{name}": tensor for name, tensor in solved.tensors().items()}
        files.write_shard(self._shard(self.shards - 1), tensors)
        entry = layer_entry(self.task, head.scheme, head.module, head.n, head.k, solved)
        files.write_json(self._head_report, entry)
        report.linear(len(self.model.blocks), head.module, solved)
        return_freed_memory()

    @property
    def _goes_on(self) -> bool:
        """Whether the outputs of the last block are needed."""
        return self._distills or self.task.head is not None

    @property
    def _distills(self) -> bool:
        return self.request.distillation_steps > 0

    def _distill(self, data: Calibration, states: list[Tensor], report: Reporter) -> None:
        """Train the written shards together. Their trained tensors are on disk before the first
        shard changes, so a job that is killed trains again or replaces all of them."""
        blocks, shards = len(self.model.blocks), [self._shard(i) for i in range(self.shards)]
        done = self.state / TRAINED
        if not done.exists():
            report.step(blocks, 0)
            gain, tensors = distill(
                self.task,
                shards,
                data.batches(TOKENS[self.device.type]),
                states,
                partial(report.step, blocks),
            )
            files.write_json(done.with_suffix(".json"), asdict(gain))
            files.write_shard(done, tensors)
            report.block(blocks, gain)
        trained = load_file(done)
        for shard in shards:
            tensors = load_file(shard)
            if trained.keys() & tensors.keys():
                files.write_shard(
                    shard, {name: trained.get(name, t) for name, t in tensors.items()}
                )

    def _check(self, report: Reporter) -> None:
        """Compare the written shards with the original."""
        return_freed_memory()
        if not (self.state / CHECKED).exists():
            shards = [self._shard(i) for i in range(self.shards)]
            files.write_json(self.state / CHECKED, check(self.task, shards, report.checked))

    # -- writing

    def _shard(self, number: int) -> Path:
        return self.output / files.shard_name(number + 1, self.shards)

    def _block_report(self, index: int) -> Path:
        return self.state / f"block-{index:05d}.json"

    @property
    def _head_report(self) -> Path:
        return self.state / "head.json"

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or name in self.copied:
            return tensor
        cast = tensor.to(self.stored_dtype)
        problem = first_nonfinite(name, cast)
        if problem:
            raise UserError(
                f"{problem} once it is cast to {self.stored_dtype}: too large for it. "
                "Choose --stored-dtype bfloat16 or float32."
            )
        return cast

    def _write_outside(self) -> None:
        inside = {
            name for i in range(len(self.model.blocks)) for name in self.model.stored_block(i)
        }
        names = [name for name in self.task.source if name not in inside | self.task.left_out]
        files.write_shard(
            self._shard(0), {name: self._cast(name, self.model.read(name)) for name in names}
        )

    def _block_tensors(
        self, index: int, packed: dict[str, Tensor], quantized: set[str]
    ) -> dict[str, Tensor]:
        """Tensors of the block's shard: packed linears, and the others as the source stores them.
        Those that AWQ has scaled are taken from the block, in its compute dtype."""
        prefix = self.model.block_prefix(index)
        parameters = {
            stored: self.model.model.get_parameter(name)
            for name, stored in self.model.stored.items()
            if name.startswith(prefix)
        }
        tensors = dict(packed)
        for name in self.model.stored_block(index):
            if name not in quantized:
                tensor = self.model.read(name)
                # Experts are not in memory, and folded only where they are packed.
                kept = name in parameters and not parameters[name].is_meta
                now = parameters[name].data.cpu() if kept else tensor
                if not torch.equal(now, tensor.to(now.dtype)):
                    tensor = now
                tensors[name] = self._cast(name, tensor)
        return tensors

    def _training(self) -> dict[str, Any] | None:
        """What training gained, for the report."""
        if self.task.training is None:
            return None
        blocks = [read_json(self._block_report(i))["gain"] for i in range(len(self.model.blocks))]
        last = self.state / TRAINED.replace("safetensors", "json")
        whole = read_json(last) if last.exists() else None
        return {**self.task.training, "blocks": blocks, "whole_model": whole}

    def _finish(self, data: Calibration | None) -> None:
        request, head = self.request, self.task.head
        files.copy_companions(self.task.source.path, self.output)
        config = dict(self.task.source.config)
        config.pop("torch_dtype", None)
        config["dtype"] = name_of(self.stored_dtype)
        if head is not None and head.tied:
            config["tie_word_embeddings"] = False  # the packed head is a layer of its own
        config["quantization_config"] = self.task.quantization_config()
        shards = [self._shard(i) for i in range(self.shards)]
        write_tensors(self.output, self.placed, shards)
        files.write_index(self.output, [shard.name for shard in shards])
        files.write_json(self.output / "config.json", config)
        blocks = range(len(self.model.blocks))
        layers = [layer for i in blocks for layer in read_json(self._block_report(i))["layers"]]
        layers += [] if head is None else [read_json(self._head_report)]
        check = read_json(self.state / CHECKED) if request.check else None
        size = sum(shard.stat().st_size for shard in shards)
        report = make_report(self.task, data, layers, self._training(), check, size)
        if request.kv is not None:  # the quantized model runs the calibration text as in the engine
            report["kv"] = write_kv_file(
                self.output, request.data, request.seed, str(self.device), self.task.kv_dtype
            )
        files.write_json(self.output / REPORT, report)
        files.write_manifest(self.output)
        shutil.rmtree(self.state)
