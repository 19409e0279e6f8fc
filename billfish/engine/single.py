"""One prompt, one text, streamed and timed: what `billfish generate` runs.

The engine writes the text. A model of a family that it does not run goes through transformers.
Prefill and decode are timed apart: the time of the first token is prefill's, tokens per second are
those of the tokens after it.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from billfish.engine.build import PAGE_TOKENS
from billfish.engine.llm import LLM
from billfish.engine.params import SamplingParams
from billfish.engine.text import Detokenizer, Vocabulary
from billfish.errors import UserError
from billfish.models.families import unlike_llama
from billfish.models.generate import Sampling, encode, tokens


@dataclass
class Timing:
    prompt_tokens: int
    tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Of decode; None for a single token, which is prefill's."""
        return (self.tokens - 1) / self.decode_seconds if self.tokens > 1 else None


def generate(
    model: Any,  # the engine's alone from now on
    tokenizer: Any,
    prompt: str,
    sampling: Sampling,
    chat: bool = False,
    say: Callable[[str], None] = warnings.warn,  # if the engine does not run it
) -> tuple[Iterator[str], Timing]:
    """Pieces of text as they come, and the timing, which is complete when the pieces are."""
    ids = encode(tokenizer, prompt, chat)
    longest = len(ids) + sampling.max_tokens
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise UserError(
            f"prompt of {len(ids)} tokens + --max-tokens {sampling.max_tokens} exceeds the "
            f"model's {limit} positions. Shorten one of them."
        )
    if found := unlike_llama(model):
        say(f"runs through transformers: {type(model).__name__} has {'; '.join(found)}.")
        parts = _through_transformers(model, tokenizer, ids, sampling)
    else:
        llm = LLM.of(
            model,
            tokenizer,
            given=True,
            max_model_len=longest,
            max_num_seqs=1,
            pages=math.ceil(longest / PAGE_TOKENS[model.device.type]),
            prefix_caching=False,
        )
        parts = _on_the_engine(llm, ids, sampling)
    timing = Timing(len(ids))
    return _timed(parts, timing), timing


def _timed(parts: Iterator[tuple[str, int]], timing: Timing) -> Iterator[str]:
    started = time.perf_counter()
    for piece, timing.tokens in parts:
        passed = time.perf_counter() - started
        timing.prompt_seconds = timing.prompt_seconds or passed
        timing.decode_seconds = passed - timing.prompt_seconds
        yield piece


def _on_the_engine(llm: LLM, ids: list[int], sampling: Sampling) -> Iterator[tuple[str, int]]:
    """New text, and how many tokens there are so far."""
    shown = 0
    with llm:
        for output in llm.iterate(ids, SamplingParams(**asdict(sampling))):
            (one,) = output.outputs
            if one.finish_reason in ("error", "cancelled"):
                raise UserError(
                    f"the engine failed: {one.error or 'it was closed.'} `billfish verify` names "
                    "the tensor, if one is bad."
                )
            yield one.text[shown:], len(one.token_ids)
            shown = len(one.text)


def _through_transformers(
    model: Any, tokenizer: Any, ids: list[int], sampling: Sampling
) -> Iterator[tuple[str, int]]:
    words, count = Detokenizer(Vocabulary(tokenizer), ids), 0
    for token in tokens(model, ids, sampling):
        count += 1
        yield words.add(token), count
    yield words.finish(), count
