"""The offline driver: read, calibrate block by block, quantize, write, resume.

It holds one block, its statistics and the calibration activations, never the model. After each
block its shard, its report and the activations that enter the next block are on disk under their
final names, so a job killed at any moment goes on at the block it was in, and ends with the same
bytes as one that was never stopped.

    out/model-00001-of-000NN.safetensors   what is outside the blocks
    out/model-0000i-of-000NN.safetensors   block i - 2
    out/.billfish/                         the job while it runs: settings, reports, activations
"""

import ctypes
import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoTokenizer

from billfish.calibrate import BlockJob, Hidden
from billfish.calibration import SAMPLE, Calibration, calibration
from billfish.compute import compute_dtype, name_of
from billfish.errors import UserError
from billfish.formats.grid import group_count
from billfish.models import checkpoint as files
from billfish.models.blocks import Arguments, StreamedModel
from billfish.models.compressed import write_config
from billfish.models.hf import Checkpoint, read_json, stored_dtype
from billfish.provenance import data_digest, sampled_digest, versions
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.quantize import METHODS, NEEDS_DATA, Solved

JOB = ".billfish"
M_MMAP_THRESHOLD = -3  # malloc.h
REPORT = "quantization_report.json"
# That pass a block together. A CPU's products are at their best with these, and what is added and
# multiplied between them still fits a cache; a GPU wants more.
TOKENS = {"cpu": 1024, "cuda": 16384}


@dataclass(frozen=True)
class Request:
    """All that decides the result. Equal requests on equal inputs give equal bytes."""

    model: Path
    output: Path
    scheme: W4A16
    method: str = "gptq"
    data: str = SAMPLE
    nsamples: int = 128
    seqlen: int = 1024
    seed: int = 0
    device: str = "cpu"
    dtype: str | torch.dtype = "auto"  # that calibration computes in
    # Of scales and of what stays unquantized; None: the model's, bf16 for an fp32 model.
    stored_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(f"--method {self.method}: known are {', '.join(METHODS)}.")


@dataclass(frozen=True)
class Progress:
    """Told to the caller after every linear and every block."""

    block: int
    blocks: int
    linear: str | None = None
    error: float | None = None
    note: str | None = None
    seconds_left: float | None = None


OnProgress = Callable[[Progress], None]


def quantize(
    request: Request, resume: bool | None = None, on_progress: OnProgress | None = None
) -> dict[str, Any]:
    """Quantize a checkpoint directory into another one; the report.

    `resume` None: go on with an unfinished job of the same request, refuse anything else that is
    there. True: the same, and a finished one is left as it is. False: start over.
    """
    started = time.monotonic()
    source = Checkpoint(request.model)
    job = Job(request, source)
    done = job.open(resume)
    if not done:
        job.run(on_progress or (lambda progress: None))
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
        own = stored_dtype(source.path)
        self.stored_dtype = request.stored_dtype or (own if own.itemsize == 2 else torch.bfloat16)
        # fp16 overflows: for what is stored in it calibration computes in fp32, on a GPU, too.
        wide = torch.float32 if self.stored_dtype == torch.float16 else self.stored_dtype
        self.dtype = compute_dtype(wide, request.device, request.dtype)
        self.model = StreamedModel(source, self.dtype, torch.device(request.device))
        self.shards = len(self.model.blocks) + 1
        self.skipped = {
            name: reason for name, _, _, reason in self.linear_fates() if reason is not None
        }
        if len(self.skipped) == len(self.linear_fates()):
            raise UserError(
                f"{source.path}: no linear can be quantized. {next(iter(self.skipped.values()))}"
            )

    def linear_fates(self) -> list[tuple[str, int, int, str | None]]:
        """(module, n, k, why it is skipped or None) of every linear, head included."""
        fates = []
        for name, module in self.model.model.named_modules():
            if isinstance(module, torch.nn.Linear):
                reason = None
                if not name.startswith(self.model.prefix + "."):
                    reason = "outside the blocks: kept in 16 bit"
                else:
                    try:
                        group_count(module.in_features, self.request.scheme.group_size)
                    except UserError as error:
                        reason = str(error)
                fates.append((name, module.out_features, module.in_features, reason))
        return fates

    # -- resuming

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for two runs to give the same bytes."""
        request = self.request
        shards = sorted({entry.file for entry in self.source.entries.values()})
        header = json.dumps(
            {n: [e.file, str(e.dtype), e.shape] for n, e in self.source.entries.items()}
        )
        return {
            "scheme": {"name": request.scheme.name, **asdict(request.scheme)},
            "method": request.method,
            "data": data_digest(request.data) if NEEDS_DATA[request.method] else None,
            "nsamples": request.nsamples,
            "seqlen": request.seqlen,
            "seed": request.seed,
            "device": request.device,
            "stored_dtype": name_of(self.stored_dtype),
            "dtype": name_of(self.dtype) if NEEDS_DATA[request.method] else None,
            "model_header_sha256": hashlib.sha256(header.encode()).hexdigest(),
            "model_samples_sha256": sampled_digest([self.source.path / shard for shard in shards]),
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
        }

    def open(self, resume: bool | None) -> bool:
        """Make or find the output directory; True if it is finished already."""
        ours, finished = (self.state / "job.json").exists(), (self.output / files.MANIFEST).exists()
        if resume is False and self.output.exists():
            if not (ours or finished or not any(self.output.iterdir())):
                raise UserError(
                    f"{self.output}: was not made by Billfish; --fresh will not delete it. "
                    "Choose another --output."
                )
            shutil.rmtree(self.output)
        elif finished and resume and not ours:
            report = read_json(self.output / REPORT)
            self._same_job(report.get("fingerprint", {}))
            return True
        elif ours:
            self._same_job(read_json(self.state / "job.json"))
            for leftover in self.output.rglob("*" + files.TEMPORARY):
                leftover.unlink()
            if finished:  # killed between the manifest and the clean-up
                shutil.rmtree(self.state)
                return True
            return False
        elif self.output.exists() and not self._untouched():
            raise UserError(
                f"{self.output}: exists and is not empty. --fresh deletes it and starts over, "
                "--resume goes on with an unfinished job, or choose another --output."
            )
        shutil.rmtree(self.state, ignore_errors=True)
        self.state.mkdir(parents=True)
        files.write_json(self.state / "job.json", self.fingerprint())
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

    def run(self, on_progress: OnProgress) -> None:
        blocks = len(self.model.blocks)
        first = next((i for i in range(blocks) if not self._block_report(i).exists()), blocks)
        data = self._calibration()
        hidden, arguments = self._enter(first, data)
        if not self._shard(0).exists():
            self._write_outside()
        self.model.model.eval()
        return_freed_memory()
        started = time.monotonic()
        for index in range(first, blocks):
            self._run_block(index, hidden, arguments, on_progress)
            return_freed_memory()
            pace = (time.monotonic() - started) / (index - first + 1)
            left = pace * (blocks - index - 1)
            on_progress(Progress(index, blocks, seconds_left=left))
        self._finish(data)

    def _calibration(self) -> Calibration | None:
        request = self.request
        if not NEEDS_DATA[request.method]:
            return None
        try:
            tokenizer = AutoTokenizer.from_pretrained(request.model, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{request.model}: no tokenizer can be loaded from it ({error}). --method "
                f"{request.method} needs one for its calibration text; rtn does not."
            ) from None
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
            return self._load_hidden(first), arguments
        original = list(quantized) if self.request.method == "gptq" else []
        return Hidden(quantized, original), arguments

    def _run_block(
        self, index: int, hidden: Hidden, arguments: Arguments | None, on_progress: OnProgress
    ) -> None:
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
            tensors = request.scheme.pack(solved.codes, solved.scales, solved.zeros)
            packed.update({f"{module}.{name}": tensor.cpu() for name, tensor in tensors.items()})
            bits = request.scheme.bits_per_weight(linear.n, linear.k, self.stored_dtype)
            layers.append({
                "name": prefix + path, "n": linear.n, "k": linear.k,
                "bits_per_weight": round(bits, 4), "error": solved.error, "note": solved.note,
            })  # fmt: skip
            progress = Progress(index, len(model.blocks), prefix + path, solved.error, solved.note)
            on_progress(progress)

        job = BlockJob(
            model, index, paths, request.scheme, request.method, self.stored_dtype, arguments
        )
        with torch.inference_mode():
            job.solve(hidden, settle)
        self._write_block(index, packed)
        if arguments is not None:
            self._save_hidden(index + 1, hidden)
        files.write_json(self._block_report(index), {"layers": layers})
        self._hidden_file(index).unlink(missing_ok=True)
        model.drop(prefix)

    # -- writing

    def _shard(self, number: int) -> Path:
        return self.output / files.shard_name(number + 1, self.shards)

    def _block_report(self, index: int) -> Path:
        return self.state / f"block-{index:05d}.json"

    def _hidden_file(self, index: int) -> Path:
        return self.state / f"hidden-{index:05d}.safetensors"

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

    def _write_block(self, index: int, packed: dict[str, Tensor]) -> None:
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
        files.write_shard(self._shard(index + 1), tensors)

    def _save_hidden(self, index: int, hidden: Hidden) -> None:
        kept = {"quantized": hidden.quantized, "original": hidden.original}
        tensors = {
            f"{part}.{i}": state.clone()
            for part, states in kept.items()
            for i, state in enumerate(states)
        }
        files.write_shard(self._hidden_file(index), tensors)

    def _load_hidden(self, index: int) -> Hidden:
        tensors = safetensors.torch.load_file(self._hidden_file(index), device=self.request.device)
        counts = [
            sum(name.startswith(part) for name in tensors) for part in ("quantized", "original")
        ]
        quantized = [tensors[f"quantized.{i}"] for i in range(counts[0])]
        return Hidden(quantized, [tensors[f"original.{i}"] for i in range(counts[1])])

    def _finish(self, data: Calibration | None) -> None:
        request = self.request
        files.copy_companions(self.source.path, self.output)
        config = dict(self.source.config)
        config.pop("torch_dtype", None)
        config["dtype"] = name_of(self.stored_dtype)
        config["quantization_config"] = write_config(request.scheme, sorted(self.skipped))
        files.write_json(self.output / "config.json", config)
        blocks = range(len(self.model.blocks))
        layers = [layer for i in blocks for layer in read_json(self._block_report(i))["layers"]]
        report = {
            "scheme": {"name": request.scheme.name, **asdict(request.scheme)},
            "method": request.method,
            "seed": request.seed,
            "dtype": config["dtype"],
            "calibration": None if data is None else {
                "source": Path(data.source).name, "sha256": data.sha256,
                "nsamples": len(data.sequences), "seqlen": request.seqlen, "tokens": data.tokens,
            },
            "layers": layers,
            "skipped": self.skipped,
            "bytes_before": self.source.nbytes,
            "bytes_after": sum(self._shard(i).stat().st_size for i in range(self.shards)),
            "versions": versions(),
            "fingerprint": self.fingerprint(),
        }  # fmt: skip
        files.write_json(self.output / REPORT, report)
        files.finish(self.output, [self._shard(i).name for i in range(self.shards)])
        shutil.rmtree(self.state)


def return_freed_memory() -> None:
    """Give freed tensors back to the system: glibc keeps the holes between blocks that come and go.
    What passes need again and again stays below the threshold; mapping it anew each time costs a
    third of a pass."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**24)
        libc.malloc_trim(0)
