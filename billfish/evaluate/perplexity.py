"""Perplexity of a text, and a model's KL divergence and top-1 agreement with its baseline.

As usual, the whole text is tokenized once and cut into windows that do not overlap, the tail is
dropped, and each window predicts its seqlen - 1 next tokens. The forward pass runs in the model's
dtype; log-softmax is fp32, a few positions at a time. Models must already be in eval mode.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from billfish.errors import UserError
from billfish.evaluate.estimate import Estimate, exp_mean, mean

DEFAULT_SEQLEN = 2048
# fp32 logits held at once, in elements: 64 MB. KL holds a handful of such pieces.
CHUNK_ELEMENTS = 2**24

OnWindow = Callable[[int, int], None]  # (windows done, windows in all)


@dataclass(frozen=True)
class Perplexity:
    value: float
    stderr: float | None  # delta method over windows; None with a single window
    windows: int
    tokens: int  # predicted, seqlen - 1 a window
    losses: tuple[float, ...]  # mean nats a token of each window, for paired comparisons


@dataclass(frozen=True)
class Divergence:
    kl: Estimate  # nats a token, KL(baseline || model)
    agreement: Estimate  # share of positions where both prefer the same token
    model: Perplexity
    baseline: Perplexity


def wikitext_text(path: str | Path) -> str:
    """The text whose perplexity is published for WikiText; the content of any other file.

    A raw file opens with a blank line and a ` = Title = ` line. Its rows are joined by two
    newlines, as in "\\n\\n".join(dataset["text"]), where a blank row is empty and every other row
    keeps its newline.
    """
    path = Path(path)
    try:
        raw = path.read_bytes().decode("utf8")  # not read_text: that would rewrite \r\n
    except FileNotFoundError:
        raise UserError(
            f"text file {path} does not exist. Give a UTF-8 text, e.g. WikiText-2's wiki.test.raw."
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"text file {path}: byte {error.start} is not UTF-8. Convert it (iconv -t utf8)."
        ) from None
    if not re.match(r"\s*\n = [^\n]* = ?\n", raw):
        return raw
    return "\n\n".join(wikitext_rows(raw))


def wikitext_rows(raw: str) -> list[str]:
    """The rows of the data set as it is published: 4,358 for the WikiText-2 test file."""
    return ["" if line.strip() == "" else line + "\n" for line in raw.split("\n")[:-1]]


def default_seqlen(config: Any) -> int:
    """2048, or less if the model's context is shorter."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(DEFAULT_SEQLEN, positions) if positions else DEFAULT_SEQLEN


def windows(tokenizer: Any, text: str, seqlen: int) -> Tensor:
    """(windows, seqlen) int64. Special tokens are added once, at the start, if at all."""
    if seqlen < 2:
        raise UserError(f"seqlen={seqlen}: a window predicts its next tokens, so it has 2 or more.")
    # verbose=False: no warning that the text is longer than the context.
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    count = ids.numel() // seqlen
    if count == 0:
        raise UserError(
            f"perplexity: the text has {ids.numel()} tokens and a window has {seqlen}. "
            f"At least one full window is needed: give a longer text or seqlen <= {ids.numel()}."
        )
    cut: Tensor = ids[: count * seqlen].view(count, seqlen)
    return cut


@torch.inference_mode()
def perplexity(
    model: Any,
    ids: Tensor,  # (windows, seqlen) int64
    on_window: OnWindow | None = None,
) -> Perplexity:
    losses = []
    for index, window in enumerate(ids):
        logits = _logits(model, window)
        loss = 0.0
        for piece in _pieces(logits):
            loss += _loss_sum(logits[piece].float(), window[1:][piece])
        losses.append(loss / (len(window) - 1))
        if on_window:
            on_window(index + 1, len(ids))
    return _perplexity(losses, ids)


@torch.inference_mode()
def divergence(
    model: Any,
    baseline: Any,
    ids: Tensor,  # (windows, seqlen) int64, the same tokens for both
    on_window: OnWindow | None = None,
) -> Divergence:
    """Both perplexities, KL and agreement from one forward pass of each model per window.

    Errors are taken over windows: tokens of one text are far from independent.
    """
    losses, baseline_losses, kls, agreements = [], [], [], []
    for index, window in enumerate(ids):
        logits, wanted = _logits(model, window), _logits(baseline, window)
        if logits.shape != wanted.shape:
            raise UserError(
                f"KL: the model has {logits.shape[-1]} logits a token and the baseline "
                f"{wanted.shape[-1]}. They must share one vocabulary: give the checkpoint that the "
                "model was quantized from as the baseline."
            )
        loss = baseline_loss = kl = agreement = 0.0
        for piece in _pieces(logits):
            ours, theirs = logits[piece].float(), wanted[piece].to(logits.device).float()
            loss += _loss_sum(ours, window[1:][piece])
            baseline_loss += _loss_sum(theirs, window[1:][piece])
            agreement += (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
            log_q, log_p = ours.log_softmax(-1), theirs.log_softmax(-1)
            # A token of probability 0 may have -inf on both sides; 0 * nan must count 0.
            terms = torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q))
            kl += terms.sum(-1, dtype=torch.float64).sum().item()
        tokens = len(window) - 1
        losses.append(loss / tokens)
        baseline_losses.append(baseline_loss / tokens)
        kls.append(kl / tokens)
        agreements.append(agreement / tokens)
        if on_window:
            on_window(index + 1, len(ids))
    return Divergence(
        kl=mean(kls),
        agreement=mean(agreements),
        model=_perplexity(losses, ids),
        baseline=_perplexity(baseline_losses, ids),
    )


def _logits(model: Any, window: Tensor) -> Tensor:
    """(seqlen - 1, vocabulary) in the model's dtype; the last position has no next token."""
    output = model(input_ids=window.unsqueeze(0).to(model.device), use_cache=False)
    logits: Tensor = output.logits[0, :-1]
    return logits


def _pieces(logits: Tensor) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    for start in range(0, len(logits), step):
        yield slice(start, start + step)


def _loss_sum(
    logits: Tensor,  # (positions, vocabulary) fp32
    targets: Tensor,  # (positions,) int64
) -> float:
    nats = functional.cross_entropy(logits, targets.to(logits.device), reduction="none")
    return nats.sum(dtype=torch.float64).item()


def _perplexity(losses: list[float], ids: Tensor) -> Perplexity:
    estimate = exp_mean(losses)
    count, seqlen = ids.shape
    return Perplexity(estimate.value, estimate.stderr, count, count * (seqlen - 1), tuple(losses))
