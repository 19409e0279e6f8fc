"""A request resolved against its model: the scheme, the linears to quantize and those to skip, the
dtypes, the calibration text. Writes nothing: `plan` reports a task, the driver runs it.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from billfish.checkpoints.dialects import dialect_of
from billfish.checkpoints.experts import by_source
from billfish.checkpoints.read import Checkpoint, stored_dtype
from billfish.checkpoints.tensors import COPIED, KEPT, QUANTIZED, Placed, place
from billfish.checkpoints.tokenizer import load_tokenizer, refuse_foreign
from billfish.errors import UserError
from billfish.models.blocks import StreamedModel
from billfish.models.compute import compute_dtype, device_of, name_of
from billfish.models.experts import gates_of
from billfish.models.load import rows_of
from billfish.models.tail import Head, find_head
from billfish.offline.kv import check_kv
from billfish.offline.provenance import data_digest, sampled_digest, versions
from billfish.offline.request import QuantizeRequest
from billfish.offline.selection import fit_scheme, unread_files
from billfish.offline.text import Calibration, calibration
from billfish.schemes.base import Scheme
from billfish.schemes.registry import fields, head_scheme

OUTSIDE = "outside the blocks: kept in 16 bit"
GATE = "decides which experts run, or how much: kept in 16 bit"
# Part of a name -> why such linears stay in 16 bits.
DENSE = {
    # DeepSeek-V3.2's: a small random model's KL divergence in 8 bits was 0.0123 with them, 0.0070
    # without, and 0.00003 where all tokens are chosen.
    ".indexer.": "chooses the tokens that attention sees: kept in 16 bit",
    # Mamba's and Jamba's: exp() of its output, from a weight that is read and not called.
    ".dt_proj": "gives the steps of a recurrence, by its weight alone: kept in 16 bit",
}


@dataclass(frozen=True)
class PackedHead(Head):
    scheme: Scheme


class Task:
    """One request and its model, checked before any work."""

    def __init__(self, request: QuantizeRequest, source: Checkpoint) -> None:
        self.request = request
        self.device = device_of(request.device)
        own = stored_dtype(source.path)
        self.stored_dtype = request.stored_dtype or (own if own.itemsize == 2 else torch.bfloat16)
        # A GPU calibrates in fp32: bf16 activations cost up to 0.1 perplexity (docs/LOG.md). A CPU
        # takes bf16 where that is fast, but never fp16, which overflows.
        narrow = self.device.type == "cpu" and self.stored_dtype != torch.float16
        wide = self.stored_dtype if narrow else torch.float32
        self.dtype = compute_dtype(wide, self.device, request.dtype)
        self.reads = request.how.needs_data or request.kv is not None
        self.kv_dtype = compute_dtype(self.stored_dtype, self.device, request.dtype)
        self.model = StreamedModel(source, self.dtype, self.device)
        self.source = self.model.checkpoint  # with a linear per expert
        self.head = None if request.head_bits is None else self._head(request.head_bits)
        shapes = [(n, k) for _, n, k, kept in self._linears() if kept is None]
        self.scheme, warning = fit_scheme(request.scheme, shapes, request.allow_skipped)
        self.warnings = [told for told in (warning, unread_files(source)) if told]
        if request.method not in self.scheme.methods:
            raise UserError(
                f"--method {request.method}: scheme {self.scheme.name} is made by "
                f"{', '.join(self.scheme.methods)}."
            )
        unfilled = ["a head" if self.model.is_encoder else "", *self.model.unfilled]
        if request.distillation_steps and any(unfilled):
            raise UserError(
                f"{source.path}: has no tensor for {', '.join(filter(None, unfilled))} of "
                f"{type(self.model.model).__name__}, so no logits to distill. Give --end-to-end 0."
            )
        self.skipped = {
            name: reason for name, _, _, reason in self.select_linears() if reason is not None
        }
        if all(name in self.skipped for name, _, _, kept in self._linears() if kept is None):
            raise UserError(
                f"{source.path}: no linear can be quantized. {next(iter(self.skipped.values()))}"
            )

    @property
    def hidden_size(self) -> int:
        """Width of the states between blocks."""
        config = self.model.model.config.get_text_config()
        known = getattr(config, "hidden_size", None)
        return int(known or max(k for _, _, k, _ in self._linears()))

    @property
    def training(self) -> dict[str, int] | None:
        """Steps, for the report; None if the method does not train."""
        request = self.request
        if request.how.refine is None:
            return None
        return {"steps": request.training_steps, "end_to_end": request.distillation_steps}

    @cached_property
    def placed(self) -> dict[str, Placed]:
        """What becomes of every tensor of the source; and a packed head that has none there, as it
        is tied to the embedding, under its name in the model."""
        quantized: dict[str, tuple[str, ...]] = {}
        for module, n, k, reason in self.select_linears():
            if reason is None:
                weight = self.model.stored.get(f"{module}.weight", f"{module}.weight")
                is_head = self.head is not None and module == self.head.module
                name = module if is_head else weight.removesuffix(".weight")
                parts = self.scheme_of(module).tensors(n, k, self.stored_dtype)
                quantized[weight] = tuple(f"{name}.{part}" for part in parts)
        entries, strangers = self.source.entries, set(self.model.strangers())
        found = {
            name: place(entry, COPIED if name in strangers else KEPT, [name])
            for name, entry in entries.items()
            if name not in quantized
        }
        for name, names in quantized.items():
            known = name if self.head is None or name in entries else self.head.weight
            found[name] = place(entries[known], QUANTIZED, names)
        return by_source(self.source, found)

    def select_linears(self) -> list[tuple[str, int, int, str | None]]:
        """(module, n, k, None or why it is not quantized) of every linear, the head included."""
        head = None if self.head is None else self.head.module
        return [
            (
                name,
                n,
                k,
                self.scheme_of(name).refuses(n, k) if kept is None or name == head else kept,
            )
            for name, n, k, kept in self._linears()
        ]

    def scheme_of(self, module: str) -> Scheme:
        """Of a linear that is quantized."""
        head = self.head
        return self.scheme if head is None or module != head.module else head.scheme

    @property
    def left_out(self) -> set[str]:
        """Tensors of the source that the result holds packed or not at all: those of the head. A
        tied one may have a copy in the source."""
        head = self.head
        if head is None:
            return set()
        return {f"{head.module}.weight", *([] if head.tied else [head.weight])}

    def _head(self, bits: int) -> PackedHead:
        found = find_head(self.model)
        if found is None:
            raise UserError(
                f"{self.source.path}: {type(self.model.model).__name__} has no head (lm_head) that "
                f"is a linear with a weight, which --head-bits {bits} would pack. Leave it out."
            )
        return PackedHead(**vars(found), scheme=head_scheme(bits, found.n, found.k))

    def _linears(self) -> list[tuple[str, int, int, str | None]]:
        """(module, n, k, why it stays in 16 bits whatever the scheme) of every linear."""
        blocks, model = self.model.prefix + ".", self.model.model
        gates = gates_of(model)

        def kept(name: str) -> str | None:
            if name in gates:
                return GATE
            found = next((why for part, why in DENSE.items() if part in name), None)
            return found if found or name.startswith(blocks) else OUTSIDE

        return [
            (name, *(int(size) for size in module.weight.shape), kept(name))
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) or name in gates
        ]

    @property
    def ignored(self) -> list[str]:
        """Linears that are not packed, for the quantization_config. Other readers look for the
        names in the files, which may differ from those in the model (Mixtral's)."""
        stored = {module: self.model.stored.get(f"{module}.weight") for module in self.skipped}
        inside = (name for module, name in stored.items() if module.startswith(self.model.prefix))
        return sorted({*stored, *(name.removesuffix(".weight") for name in inside if name)})

    def read_calibration(self) -> Calibration | None:
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
        if not request.how.needs_data:
            return None
        limit = getattr(self.model.model.config.get_text_config(), "max_position_embeddings", None)
        seqlen = min(request.seqlen, limit or request.seqlen)
        data = calibration(request.data, tokenizer, request.nsamples, seqlen, request.seed)
        if request.how.refine is not None and len(data.sequences) < 2:
            raise UserError(
                f"{request.data}: has one sequence; --method {request.method} needs two sequences, "
                "one of them to tell whether training helped. Give more text or --nsamples."
            )
        return data

    def quantization_config(self) -> dict[str, Any]:
        """What config.json says of the packed linears."""
        scheme, head, ignore = self.scheme, self.head, self.ignored
        if head is None:
            return dialect_of([scheme]).config_of_all(scheme, ignore)
        schemes: dict[str, Scheme] = {
            linear.weight.removesuffix(".weight"): scheme
            for index in range(len(self.model.blocks))
            for linear in self.model.linears(index)
            if self.model.block_prefix(index) + linear.path not in self.skipped
        }
        schemes[head.module] = head.scheme
        return dialect_of(schemes.values()).config(schemes, ignore)

    def fingerprint(self) -> dict[str, Any]:
        """Everything that must be equal for two runs to give the same bytes."""
        request = self.request
        held = self.source.held
        shards = sorted({entry.file for entry in held.values()})
        header = json.dumps({n: [e.file, str(e.dtype), e.shape] for n, e in held.items()})
        return {
            "scheme": fields(self.scheme),
            "method": request.method,
            "data": data_digest(request.data) if self.reads else None,
            "nsamples": request.nsamples,
            "seqlen": request.seqlen,
            "seed": request.seed,
            "device": str(self.device),
            "stored_dtype": name_of(self.stored_dtype),
            "training": self.training,
            "head_bits": request.head_bits,
            "dtype": name_of(self.dtype) if self.reads else None,
            "kv": request.kv and f"{request.kv} in {name_of(self.kv_dtype)}",
            "model_header_sha256": hashlib.sha256(header.encode()).hexdigest(),
            "model_samples_sha256": sampled_digest([self.source.path / shard for shard in shards]),
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
        }

    def same_job(self, before: dict[str, Any], where: Path) -> None:
        """Raise unless `before`, the fingerprint of the job in `where`, equals this task's."""
        now = self.fingerprint()
        changed = [key for key in now if before.get(key) != now[key]]
        if changed:
            details = "; ".join(f"{key} was {before.get(key)}, is {now[key]}" for key in changed)
            ways = {"dtype": "--dtype ", "threads": "OMP_NUM_THREADS="}
            told = [
                f"{way}{before[key]}"
                for key, way in ways.items()
                if key in changed and before.get(key)
            ]
            other = f", with {' and '.join(told)}" if told else ""
            raise UserError(
                f"{where}: holds a job made another way ({details}). "
                f"Run that command again{other}, or start over with --fresh."
            )
