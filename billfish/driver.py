"""The offline driver: read, calibrate block by block, quantize, write, resume.

It holds one block, its statistics and the calibration activations, never the model. After each
block its shard, its report and the activations that enter the next block are on disk under their
final names, so a job killed at any moment goes on at the block it was in, and ends with the same
bytes as one that was never stopped.

    out/model-00001-of-000NN.safetensors   what is outside the blocks
    out/model-0000i-of-000NN.safetensors   block i - 2
    out/.billfish/                         the job while it runs: settings, reports, activations
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from billfish import groups
from billfish.calibrate import BlockJob
from billfish.calibration import Calibration, calibration
from billfish.compute import compute_dtype, device_of, name_of
from billfish.errors import UserError
from billfish.hidden import Hidden
from billfish.kv import calibrate_kv, check_kv
from billfish.models import checkpoint as files
from billfish.models.blocks import Arguments, StreamedModel
from billfish.models.compressed import write_config
from billfish.models.hf import Checkpoint, read_json, stored_dtype
from billfish.models.load import load_tokenizer, refuse_foreign, rows_of
from billfish.models.unfinished import JOB, SETTINGS
from billfish.provenance import data_digest, sampled_digest, versions
from billfish.request import Progress, Request
from billfish.schemes.w4a16.quantize import NEEDS_DATA, Solved
from billfish.streaming import Writes, return_freed_memory

REPORT = "quantization_report.json"
# That pass a block together. A CPU's products are at their best with these, and what is added and
# multiplied between them still fits a cache; a GPU wants more.
TOKENS = {"cpu": 1024, "cuda": 16384}


OnProgress = Callable[[Progress], None]


def quantize(
    request: Request, resume: bool = True, on_progress: OnProgress | None = None
) -> dict[str, Any]:
    """Quantize a checkpoint directory into another one; the report.

    `resume`: an unfinished job of the same request goes on, a finished one is left as it is, and
    anything else that is there is refused. Otherwise: start over.
    """
    started = time.monotonic()
    source = Checkpoint(request.model)
    job = Job(request, source)
    data = job._calibration()  # a text that cannot be read is told before anything is written
    if not job.open(resume):
        job.run(data, on_progress or (lambda progress: None))
    report = read_json(request.output / REPORT)
    return {
        **report,
        "seconds": round(time.monotonic() - started, 1),
        "output": str(request.output),
    }


class Job:
    def __init__(self, request: Request, source: Checkpoint) -> None:
        self.request, self.source, self.output = request, source, request.output
        self.state = request.output / JOB
        self.device = device_of(request.device)
        own = stored_dtype(source.path)
        self.stored_dtype = request.stored_dtype or (own if own.itemsize == 2 else torch.bfloat16)
        # On a GPU in fp32: activations of bf16 cost up to 0.1 perplexity (docs/LOG.md). fp16
        # overflows, on a CPU, too.
        narrow = self.device.type == "cpu" and self.stored_dtype != torch.float16
        wide = self.stored_dtype if narrow else torch.float32
        self.dtype = compute_dtype(wide, self.device, request.dtype)
        self.reads = NEEDS_DATA[request.method] or request.kv is not None
        self.kv_dtype = compute_dtype(self.stored_dtype, self.device, request.dtype)
        self.model = StreamedModel(source, self.dtype, self.device)
        self.shards = len(self.model.blocks) + 1
        shapes = [(n, k) for _, n, k, inside in self._linears() if inside]
        self.scheme, self.warning = groups.settle(request.scheme, shapes, request.allow_skipped)
        self.skipped = {
            name: reason for name, _, _, reason in self.linear_fates() if reason is not None
        }
        if len(self.skipped) == len(self.linear_fates()):
            raise UserError(
                f"{source.path}: no linear can be quantized. {next(iter(self.skipped.values()))}"
            )

    def linear_fates(self) -> list[tuple[str, int, int, str | None]]:
        """(module, n, k, why it is skipped or None) of every linear, head included."""
        size, outside = self.scheme.group_size, "outside the blocks: kept in 16 bit"
        return [
            (name, n, k, groups.why_left(size, k) if inside else outside)
            for name, n, k, inside in self._linears()
        ]

    def _linears(self) -> list[tuple[str, int, int, bool]]:
        """(module, n, k, whether it is in a block)"""
        blocks = self.model.prefix + "."
        return [
            (name, module.out_features, module.in_features, name.startswith(blocks))
            for name, module in self.model.model.named_modules()
            if isinstance(module, torch.nn.Linear)
        ]

    # -- resuming

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for two runs to give the same bytes."""
        request = self.request
        shards = sorted({entry.file for entry in self.source.entries.values()})
        header = json.dumps(
            {n: [e.file, str(e.dtype), e.shape] for n, e in self.source.entries.items()}
        )
        return {
            "scheme": {"name": self.scheme.name, **asdict(self.scheme)},
            "method": request.method,
            "data": data_digest(request.data) if self.reads else None,
            "nsamples": request.nsamples,
            "seqlen": request.seqlen,
            "seed": request.seed,
            "device": str(self.device),
            "stored_dtype": name_of(self.stored_dtype),
            "dtype": name_of(self.dtype) if self.reads else None,
            "kv": request.kv and f"{request.kv} in {name_of(self.kv_dtype)}",
            "model_header_sha256": hashlib.sha256(header.encode()).hexdigest(),
            "model_samples_sha256": sampled_digest([self.source.path / shard for shard in shards]),
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
        }

    def open(self, resume: bool) -> bool:
        """Make or find the output directory; True if it is finished already."""
        manifest, report = self.output / files.MANIFEST, self.output / REPORT
        ours, finished = (self.state / SETTINGS).exists(), manifest.exists()
        if not resume and self.output.exists():
            if not (ours or finished or not any(self.output.iterdir())):
                raise UserError(
                    f"{self.output}: was not made by Billfish; --fresh will not delete it. "
                    "Choose another --output."
                )
            proofs = (manifest, self.state)  # go last: stopped in between, --fresh can go on
            for path in sorted(self.output.iterdir(), key=lambda path: path in proofs):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        elif finished and report.exists():
            self._same_job(read_json(report).get("fingerprint", {}))
            shutil.rmtree(self.state, ignore_errors=True)  # killed between the manifest and this
            return True
        elif ours:
            self._same_job(read_json(self.state / SETTINGS))
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
        files.write_json(self.state / SETTINGS, self.fingerprint())
        return False

    def _untouched(self) -> bool:
        """An empty directory, or one in which a job died before it had written its settings."""
        return self.output.is_dir() and all(path == self.state for path in self.output.iterdir())

    def _same_job(self, before: dict[str, Any]) -> None:
        now = self.fingerprint()
        changed = [key for key in now if before.get(key) != now[key]]
        if changed:
            details = "; ".join(f"{key} was {before.get(key)}, is {now[key]}" for key in changed)
            told = before.get("dtype") if "dtype" in changed else None
            other = f", with --dtype {told}" if told else ""
            raise UserError(
                f"{self.output}: holds a job made another way ({details}). "
                f"Run that command again{other}, or start over with --fresh."
            )

    # -- running

    def run(self, data: Calibration | None, on_progress: OnProgress) -> None:
        blocks = len(self.model.blocks)
        first = self._first()
        hidden, arguments = self._enter(first, data)
        if not self._shard(0).exists():
            self._write_outside()
        self.model.model.eval()
        return_freed_memory()
        started = time.monotonic()
        with Writes(at_once=self.device.type == "cpu") as writes:
            for index in range(first, blocks):
                write = self._run_block(index, hidden, arguments, on_progress)
                writes(partial(write, index + 1 < blocks and writes.may_be_large))
                return_freed_memory()
                pace = (time.monotonic() - started) / (index - first + 1)
                left = pace * (blocks - index - 1)
                on_progress(Progress(index, blocks, seconds_left=left))
        self._finish(data)

    def _first(self) -> int:
        """The block to begin with: behind the finished ones, as far as their activations are
        there."""
        blocks = len(self.model.blocks)
        ready = next((i for i in range(blocks) if not self._block_report(i).exists()), blocks)
        if ready == blocks or not NEEDS_DATA[self.request.method]:
            return ready
        return max((index for index in Hidden.saved(self.state) if index <= ready), default=0)

    def _calibration(self) -> Calibration | None:
        request = self.request
        if not self.reads:
            return None
        try:
            tokenizer = load_tokenizer(request.model)
        except UserError as error:
            raise UserError(
                f"{error} --method {request.method} needs it for its calibration text; rtn without "
                "--kv does not."
            ) from None
        refuse_foreign(tokenizer, rows_of(self.model.model), request.model)
        if request.kv is not None:
            check_kv(self.model.model, tokenizer, request.data, request.seed)
        if not NEEDS_DATA[request.method]:
            return None
        limit = getattr(self.model.model.config.get_text_config(), "max_position_embeddings", None)
        seqlen = min(request.seqlen, limit or request.seqlen)
        return calibration(request.data, tokenizer, request.nsamples, seqlen, request.seed)

    def _enter(self, first: int, data: Calibration | None) -> tuple[Hidden, Arguments | None]:
        """Activations before block `first`: from the embeddings, or as the stopped job left
        them."""
        if data is None or first == len(self.model.blocks):
            return Hidden([]), None
        quantized, arguments = self.model.first_inputs(data.batches(TOKENS[self.model.device.type]))
        if first:
            return Hidden.load(self.state, first, self.device), arguments
        original = list(quantized) if self.request.method == "gptq" else []
        return Hidden(quantized, original), arguments

    def _run_block(
        self, index: int, hidden: Hidden, arguments: Arguments | None, on_progress: OnProgress
    ) -> Callable[[bool], None]:
        """Solves one block; what is returned writes it, and, if told, the activations behind it."""
        request, model = self.request, self.model
        prefix = model.block_prefix(index)
        model.fill(prefix)
        linears = {linear.path: linear for linear in model.linears(index)}
        paths = [path for path in linears if prefix + path not in self.skipped]
        packed: dict[str, Tensor] = {}
        layers: list[dict[str, Any]] = []

        def settle(path: str, solved: Solved) -> None:
            linear = linears[path]
            module = linear.weight.removesuffix(".weight")
            tensors = self.scheme.pack(solved.codes, solved.scales, solved.zeros)
            packed.update({f"{module}.{name}": tensor.cpu() for name, tensor in tensors.items()})
            bits = self.scheme.bits_per_weight(linear.n, linear.k, self.stored_dtype)
            layers.append({
                "name": prefix + path, "n": linear.n, "k": linear.k,
                "bits_per_weight": round(bits, 4), "error": solved.error, "note": solved.note,
            })  # fmt: skip
            progress = Progress(index, len(model.blocks), prefix + path, solved.error, solved.note)
            on_progress(progress)

        job = BlockJob(
            model, index, paths, self.scheme, request.method, self.stored_dtype, arguments
        )
        with torch.inference_mode():
            job.solve(hidden, settle)
        tensors = self._block_tensors(index, packed)
        left = hidden.copy()
        model.drop(prefix)

        def write(save: bool) -> None:
            files.write_shard(self._shard(index + 1), tensors)
            older = Hidden.saved(self.state)
            if save and arguments is not None:
                left.save(self.state, index + 1)
            files.write_json(self._block_report(index), {"layers": layers})
            if save:
                for path in older.values():
                    path.unlink()

        return write

    # -- writing

    def _shard(self, number: int) -> Path:
        return self.output / files.shard_name(number + 1, self.shards)

    def _block_report(self, index: int) -> Path:
        return self.state / f"block-{index:05d}.json"

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        cast = tensor.to(self.stored_dtype)
        problem = files.first_nonfinite(name, cast)
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
        names = [name for name in self.source if name not in inside]
        files.write_shard(
            self._shard(0), {name: self._cast(name, self.model.read(name)) for name in names}
        )

    def _block_tensors(self, index: int, packed: dict[str, Tensor]) -> dict[str, Tensor]:
        """Packed linears, and everything else as the source has it; what AWQ has scaled, as it is
        now, in the type that calibration computes in."""
        prefix = self.model.block_prefix(index)
        parameters = {
            stored: self.model.model.get_parameter(name)
            for name, stored in self.model.stored.items()
            if name.startswith(prefix)
        }
        tensors = dict(packed)
        for name in self.model.stored_block(index):
            if name.removesuffix(".weight") + ".weight_packed" not in packed:
                tensor = self.model.read(name)
                now = parameters[name].data.cpu() if name in parameters else tensor
                if not torch.equal(now, tensor.to(now.dtype)):
                    tensor = now
                tensors[name] = self._cast(name, tensor)
        return tensors

    def _finish(self, data: Calibration | None) -> None:
        request = self.request
        files.copy_companions(self.source.path, self.output)
        config = dict(self.source.config)
        config.pop("torch_dtype", None)
        config["dtype"] = name_of(self.stored_dtype)
        config["quantization_config"] = write_config(self.scheme, sorted(self.skipped))
        files.write_index(self.output, [self._shard(i).name for i in range(self.shards)])
        files.write_json(self.output / "config.json", config)
        blocks = range(len(self.model.blocks))
        layers = [layer for i in blocks for layer in read_json(self._block_report(i))["layers"]]
        report = {
            "scheme": {"name": self.scheme.name, **asdict(self.scheme)},
            "method": request.method,
            "seed": request.seed,
            "dtype": config["dtype"],
            "calibration": None if data is None else {
                "source": Path(data.source).name, "sha256": data.sha256,
                "nsamples": len(data.sequences), "seqlen": request.seqlen, "tokens": data.tokens,
            },
            "layers": layers,
            "skipped": self.skipped,
            "warnings": [self.warning] if self.warning else [],
            "bytes_before": self.source.nbytes,
            "bytes_after": sum(self._shard(i).stat().st_size for i in range(self.shards)),
            "versions": versions(),
            "fingerprint": self.fingerprint(),
        }  # fmt: skip
        if request.kv is not None:  # the finished model reads the text, as the engine runs it
            report["kv"] = calibrate_kv(
                self.output, request.data, request.seed, str(self.device), self.kv_dtype
            )
        files.write_json(self.output / REPORT, report)
        files.write_manifest(self.output)
        shutil.rmtree(self.state)
