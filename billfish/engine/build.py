"""From a checkpoint, or a model in memory, to an engine: loads the model, sizes the KV cache and
chooses the runner.
"""

import math
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from billfish.engine.core import Engine
from billfish.engine.cuda import runner as gpu
from billfish.engine.cuda.pool import POOLS, Pool
from billfish.engine.kv.cache import CALIBRATED, FORMATS, Cache, Kv4, Kv4Channels, Room
from billfish.engine.kv.pages import Pages
from billfish.engine.kv.stored import rotation_of, stored_ranges
from billfish.engine.runner import Runner, TorchRunner
from billfish.errors import UserError
from billfish.models.decoder import Decoder
from billfish.models.linear import QuantLinear
from billfish.models.load import load

PAGE_TOKENS = {"cpu": 16, "cuda": 64}  # 64: one record of the GPU's cache
BUDGET = {"cpu": 512, "cuda": 4096}  # tokens a step: as many as keep the device busy
CPU_CACHE = 2**30  # bytes, unless told
STORAGE = {**FORMATS, **CALIBRATED}
Made = TypeVar("Made")


class Loaded(NamedTuple):
    model: Any
    tokenizer: Any
    given: bool  # the engine owns the model and may rearrange its weights


Source = Path | str | Loaded


@dataclass(frozen=True)
class Settings:
    """LLM's arguments, checked."""

    kv: str
    dtype: str | torch.dtype
    device: str
    max_model_len: int | None
    max_num_seqs: int
    max_batched_tokens: int | None
    gpu_memory: float
    pages: int | None
    prefix_caching: bool
    batch_invariant: bool

    def __post_init__(self) -> None:
        if self.kv not in STORAGE:
            raise UserError(f"kv {self.kv!r}: known are {', '.join(STORAGE)}.")
        for name in ("max_model_len", "max_num_seqs", "max_batched_tokens", "pages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} {value}: at least 1.")
        if not 0 < self.gpu_memory <= 1:
            raise UserError(f"gpu_memory {self.gpu_memory}: above 0, at most 1.")


def build(source: Source, told: Settings) -> Engine:
    loaded = (
        source
        if isinstance(source, Loaded)
        else Loaded(*load(source, told.dtype, told.device, told.batch_invariant), given=True)
    )
    model, tokenizer = loaded.model, loaded.tokenizer
    invariant = told.batch_invariant or any(
        isinstance(layer, QuantLinear) and layer.op is not None and layer.op.batch_invariant
        for layer in model.modules()
    )
    decoder = Decoder.of(model)
    if loaded.given:
        decoder.prepack()
    shape, kind = decoder.shape, decoder.device.type
    if kind not in PAGE_TOKENS:
        raise UserError(f"device {kind}: the engine runs on cpu and cuda.")
    longest = told.max_model_len or shape.context
    if longest > shape.context:
        raise UserError(
            f"max_model_len {longest}: this model has {shape.context} positions "
            "(max_position_embeddings in its config.json). Lower it, or leave it out."
        )
    slow = gpu.refuses(decoder, told.kv)
    if slow and kind == "cuda":
        warnings.warn(f"the engine runs through PyTorch's operators: {slow}.", stacklevel=4)
    size, storage = PAGE_TOKENS[kind], STORAGE[told.kv] if slow else POOLS[told.kv]
    pages = told.pages
    if pages is None:
        token = storage.bytes_a_token(shape.layers, shape.kv_heads, shape.head_dim, decoder.dtype)
        pages = _room(decoder.device, told.gpu_memory) // (token * size)
        pages = min(pages, math.ceil(longest / size) * told.max_num_seqs)
        if pages * size < longest:
            raise UserError(
                f"the cache has room for {pages * size} tokens, a text of max_model_len {longest} "
                f"needs more. Lower max_model_len, or take another kv ({', '.join(FORMATS)})."
            )
    room = Room(
        shape.layers, pages, size, shape.kv_heads, shape.head_dim, decoder.dtype, decoder.device
    )
    cache: Cache | Pool = storage(room)
    budget = told.max_batched_tokens or BUDGET[kind]
    sequences = min(told.max_num_seqs, budget)
    rotation = rotation_of(source, decoder, tokenizer, longest) if told.kv == "kv4" else None
    runner: Runner
    if isinstance(cache, Pool):
        runner = gpu.GpuRunner(
            decoder,
            cache,
            sequences,
            longest,
            rotation,
            invariant=invariant,
            # A row's last bits differ from FlashAttention's. In a quantized cache that flips codes,
            # and texts change with the batch.
            by_rows=not told.batch_invariant and told.kv == "kv16",
            budget=budget,
        )
    else:
        if isinstance(cache, Kv4):
            cache.rotation = rotation
        if isinstance(cache, Kv4Channels):
            cache.set_ranges(stored_ranges(source))
        runner = TorchRunner(decoder, cache)
    kept = Pages(pages, size, told.prefix_caching)
    return Engine(runner, tokenizer, kept, _eos(model, tokenizer), budget, sequences, longest)


def apart(device: str, make: Callable[[], Made]) -> Made:
    """Calls `make`, on a CPU in a thread that ends. OpenMP keeps a team for every thread that has
    computed, and once the teams together outnumber the cores none of them spins between products:
    the engine thread's steps took 20 to 30 % longer where the caller's had loaded the model."""
    if device != "cpu":
        return make()
    made: Future[Made] = Future()

    def work() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    thread = threading.Thread(target=work, name="billfish-load", daemon=True)  # for Ctrl-C
    thread.start()
    try:
        return made.result()
    finally:
        if made.done():
            thread.join()


def _room(device: torch.device, share: float) -> int:
    """Bytes for the cache; on a GPU what the weights have left of its share."""
    if device.type == "cpu":
        return CPU_CACHE
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(free - (1 - share) * total))


def _eos(model: Any, tokenizer: Any) -> frozenset[int]:
    ends = {tokenizer.eos_token_id}
    told = getattr(model.generation_config, "eos_token_id", None)
    ends |= set(told) if isinstance(told, list) else {told}
    return frozenset(end for end in ends if end is not None)
