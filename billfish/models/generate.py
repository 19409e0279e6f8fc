"""What `billfish generate` is asked, and transformers' own generate for models that the engine
does not run.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch

from billfish.checkpoints.match import cause
from billfish.errors import UserError
from billfish.models.template import Renderer


@dataclass(frozen=True)
class Sampling:
    """Names and meanings are those of the engine's SamplingParams."""

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


def encode(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    """The prompt's token ids; with `chat` as the user's message in the model's chat template."""
    if chat:
        if not tokenizer.chat_template:
            raise UserError("--chat: this model has no chat template. Leave --chat out.")
        with Renderer() as renderer:
            prompt = renderer.render(tokenizer, [{"role": "user", "content": prompt}])
    ids: list[int] = tokenizer(prompt, add_special_tokens=not chat).input_ids
    if not ids:
        raise UserError("--prompt is empty; give at least one token.")
    return ids


def tokens(model: Any, prompt: list[int], sampling: Sampling) -> Iterator[int]:
    """Yields token ids as transformers' generate, in a thread of its own, draws them."""
    ids = torch.tensor([prompt], device=model.device)
    choice: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if sampling.temperature > 0:
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        choice = {"do_sample": True, **drawn}
    news: SimpleQueue[Any] = SimpleQueue()  # the prompt, tokens, and None or an error at the end
    streamer = SimpleNamespace(put=lambda ids: news.put(ids.tolist()), end=lambda: news.put(None))

    def work() -> None:
        try:
            torch.manual_seed(sampling.seed)
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                streamer=streamer,
                max_new_tokens=sampling.max_tokens,
                logits_processor=[_refuse_nan],
                **choice,
            )
        except BaseException as error:
            news.put(error)

    threading.Thread(target=work, daemon=True).start()
    for place, told in enumerate(iter(news.get, None)):
        if isinstance(told, UserError):
            raise told
        if isinstance(told, BaseException):  # its checks of generation_config.json, as a rule
            raise UserError(f"{model.name_or_path}: {cause(told)}") from told
        if place > 0:
            yield told[0]


def _refuse_nan(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor that changes nothing."""
    if bool(scores.isnan().any()):
        raise UserError(
            "the model computes NaN. `billfish verify` names the tensor, if one is bad."
        )
    return scores
