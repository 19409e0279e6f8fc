"""Generating text with a loaded model through transformers, with honest timing.

Prompt and decoding are timed apart: tokens per second are those of decoding, the first token's time
is the prompt's. The engine, with batching and a paged cache, is a room of its own.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.streamers import TextIteratorStreamer

from billfish.checkpoints.match import cause
from billfish.errors import UserError
from billfish.models.template import Renderer


@dataclass(frozen=True)
class Sampling:
    max_tokens: int = 256
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"--max-tokens {self.max_tokens}: at least 1.")
        if not 0 <= self.temperature <= 100:  # as the engine's; fp32 stays finite
            raise UserError(f"--temperature {self.temperature}: 0 (greedy) to 100.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p}: above 0, at most 1.")
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"--seed {self.seed}: a number of 64 bits.")


@dataclass
class Timing:
    prompt_tokens: int = 0
    tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    times: list[float] = field(default_factory=list, repr=False)

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding; None for a single token, which only shows the prompt's speed."""
        return (self.tokens - 1) / self.decode_seconds if self.tokens > 1 else None


class _Streamer(TextIteratorStreamer):
    """Also notes when each token came."""

    def __init__(self, tokenizer: Any, timing: Timing) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.timing = timing

    def put(self, value: Any) -> None:
        self.timing.times.append(time.perf_counter())
        super().put(value)  # type: ignore[no-untyped-call]


def refuse_nan(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor that changes nothing."""
    if bool(scores.isnan().any()):
        raise UserError(
            "the model computes NaN. `billfish verify` names the tensor, if one is bad."
        )
    return scores


def encode(tokenizer: Any, prompt: str, chat: bool) -> torch.Tensor:  # (1, length)
    if chat:
        if not tokenizer.chat_template:
            raise UserError("--chat: this model has no chat template. Leave --chat out.")
        with Renderer() as renderer:
            text = renderer.render(tokenizer, [{"role": "user", "content": prompt}])
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    else:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
    if ids.shape[1] == 0:
        raise UserError("--prompt is empty; give at least one token.")
    result: torch.Tensor = ids
    return result


def generate(
    model: Any, tokenizer: Any, prompt: str, sampling: Sampling, chat: bool = False
) -> tuple[Iterator[str], Timing]:
    """Pieces of text as they come, and the timing, which is complete when the pieces are."""
    ids = encode(tokenizer, prompt, chat).to(model.device)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and ids.shape[1] + sampling.max_tokens > limit:
        raise UserError(
            f"prompt of {ids.shape[1]} tokens + --max-tokens {sampling.max_tokens} exceeds the "
            f"model's {limit} positions. Shorten one of them."
        )
    timing = Timing(prompt_tokens=ids.shape[1])
    return _pieces(model, tokenizer, ids, sampling, timing), timing


def _pieces(
    model: Any, tokenizer: Any, ids: torch.Tensor, sampling: Sampling, timing: Timing
) -> Iterator[str]:
    streamer = _Streamer(tokenizer, timing)
    choice: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if sampling.temperature > 0:
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        choice = {"do_sample": True, **drawn}
    failed: list[BaseException] = []

    def work() -> None:
        try:
            torch.manual_seed(sampling.seed)
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                streamer=streamer,
                max_new_tokens=sampling.max_tokens,
                logits_processor=[refuse_nan],
                **choice,
            )
        except BaseException as error:  # handed to the thread that reads the pieces
            failed.append(error)
            streamer.end()  # type: ignore[no-untyped-call]

    thread = threading.Thread(target=work, daemon=True)
    started = time.perf_counter()
    thread.start()
    yield from streamer
    thread.join()
    if failed and isinstance(failed[0], UserError):
        raise failed[0]
    if failed:  # transformers' own checks of generation_config.json, as a rule
        raise UserError(f"{model.name_or_path}: {cause(failed[0])}") from failed[0]
    came = timing.times[1:]  # the first put is the prompt itself
    timing.tokens = len(came)
    timing.prompt_seconds = came[0] - started
    timing.decode_seconds = came[-1] - came[0]
