"""Runs an evaluation: a model, optionally its baseline, and tasks -> a dict for JSON.

One model is in memory at a time, except for KL, which needs both. Infinite and NaN values become
None, since JSON lacks them.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from billfish.checkpoints.match import model_config
from billfish.checkpoints.read import Checkpoint, stored_dtype
from billfish.checkpoints.tokenizer import load_tokenizer, refuse_foreign
from billfish.errors import UserError
from billfish.evaluate.estimate import Estimate, exp_difference, finite, ratio_of_means
from billfish.evaluate.perplexity import (
    Divergence,
    OnWindow,
    Perplexity,
    default_seqlen,
    divergence,
    perplexity,
    windows,
)
from billfish.evaluate.request import (
    EvalRequest,
    bytes_on_disk,
    check_request,
    cpu_name,
    data_hashes,
    package_versions,
    read_quantization_report,
)
from billfish.evaluate.tasks import read_text, run_task, task_of
from billfish.models.compute import compute_dtype, device_of, name_of
from billfish.models.load import load_model, rows_of

__all__ = ["EvalRequest", "evaluate"]

SCHEMA_VERSION = 1

Say = Callable[[str], None]


@dataclass(frozen=True)
class LoadedModel:
    model: Any
    tokenizer: Any
    ids: dict[str, Tensor]  # of each text task, (windows, seqlen)

    @property
    def dtype(self) -> str:
        return name_of(self.model.dtype)


@dataclass(frozen=True)
class Score:
    metric: str
    value: float
    stderr: float | None
    samples: int  # questions, or windows
    tokens: int | None  # predicted, of a text
    seconds: float
    observations: tuple[float, ...]  # 0 or 1 per question, or nats a token per window


@dataclass
class Measured:
    """Scores by task."""

    model: dict[str, Score] = field(default_factory=dict)
    baseline: dict[str, Score] = field(default_factory=dict)
    divergence: dict[str, Divergence] = field(default_factory=dict)
    dtype: dict[str, str] = field(default_factory=dict)


def evaluate(request: EvalRequest, say: Say | None = None) -> dict[str, Any]:
    """Runs the request. `say` is called with one line of progress at a time."""
    began = time.perf_counter()
    check_request(request)
    data = data_hashes(request)
    quantization = read_quantization_report(request.model)
    seqlen = request.seqlen or min(
        default_seqlen(model_config(Checkpoint(path)))
        for path in (request.model, request.baseline)
        if path is not None
    )
    run = _run_both if request.kl else _run_in_turn
    measured = run(request, seqlen, say or (lambda line: None))

    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": request.command,
        "model": _checkpoint(request.model),
        "baseline": None if request.baseline is None else _checkpoint(request.baseline),
        "tasks": [_entry(name, measured) for name in request.tasks],
        "mean_recovery": _mean_recovery(request, measured),
        "settings": {
            "dtype": measured.dtype,
            "seqlen": seqlen if request.texts else None,
            "limit": request.limit,
            "batch_size": request.batch_size,
            "device": request.device,
        },
        "data": data,
        "machine": {"cpu": cpu_name(), "threads": torch.get_num_threads()},
        "versions": package_versions(request),
        "seconds": time.perf_counter() - began,
    }
    if quantization is not None:
        result["quantization"] = quantization
    checked: dict[str, Any] = finite(result)
    return checked


def _run_in_turn(request: EvalRequest, seqlen: int, say: Say) -> Measured:
    measured = Measured()
    loaded = _load(request.model, request, seqlen, say)
    measured.dtype["model"] = loaded.dtype
    ids = loaded.ids
    for name in request.tasks:
        measured.model[name] = _score(loaded, name, request, say, "model")
    del loaded
    gc.collect()  # a model in a reference cycle would stay in memory while the next is loaded
    if request.baseline is not None:
        loaded = _load(request.baseline, request, seqlen, say)
        measured.dtype["baseline"] = loaded.dtype
        _check_same_tokens(ids, loaded.ids)
        for name in request.tasks:
            measured.baseline[name] = _score(loaded, name, request, say, "baseline")
    return measured


def _run_both(request: EvalRequest, seqlen: int, say: Say) -> Measured:
    assert request.baseline is not None
    measured = Measured()
    loaded = _load(request.model, request, seqlen, say)
    baseline = _load(request.baseline, request, seqlen, say)
    measured.dtype.update(model=loaded.dtype, baseline=baseline.dtype)
    _check_same_tokens(loaded.ids, baseline.ids)
    for name in request.tasks:
        if name in request.texts:
            began = time.perf_counter()
            on_window = _progress(say, "model and baseline", name)
            found = divergence(loaded.model, baseline.model, loaded.ids[name], on_window)
            seconds = (time.perf_counter() - began) / 2  # one pass over both, shared evenly
            measured.model[name] = _text_score(found.model, seconds)
            measured.baseline[name] = _text_score(found.baseline, seconds)
            measured.divergence[name] = found
        else:
            measured.model[name] = _score(loaded, name, request, say, "model")
            measured.baseline[name] = _score(baseline, name, request, say, "baseline")
    return measured


def _load(path: str | Path, request: EvalRequest, seqlen: int, say: Say) -> LoadedModel:
    say(f"loading {path}")
    where = device_of(request.device)
    tokenizer = load_tokenizer(path)
    ids = {
        name: windows(tokenizer, read_text(name, request.data_dir), seqlen)[: request.limit]
        for name in request.texts
    }
    model = load_model(path, compute_dtype(stored_dtype(path), where, request.dtype))
    refuse_foreign(tokenizer, rows_of(model), path)
    return LoadedModel(model.to(where).eval(), tokenizer, ids)


def _check_same_tokens(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name in ours:
        if not torch.equal(ours[name], theirs[name]):
            raise UserError(
                f"task {name}: the tokenizers of model and baseline cut the text differently, so "
                "their perplexities cannot be compared. Give the checkpoint the model was made "
                "from as the baseline."
            )


def _progress(say: Say, role: str, name: str) -> OnWindow:
    return lambda done, total: say(f"{role}: {name}, window {done} of {total}")


def _score(loaded: LoadedModel, name: str, request: EvalRequest, say: Say, role: str) -> Score:
    began = time.perf_counter()
    if name in request.texts:
        found = perplexity(loaded.model, loaded.ids[name], _progress(say, role, name))
        return _text_score(found, time.perf_counter() - began)
    say(f"{role}: {name}")
    task = run_task(
        loaded.model,
        loaded.tokenizer,
        name,
        request.data_dir,
        limit=request.limit,
        batch_size=request.batch_size,
    )
    seconds = time.perf_counter() - began
    return Score(task.metric, task.value, task.stderr, task.samples, None, seconds, task.scores)


def _text_score(found: Perplexity, seconds: float) -> Score:
    return Score(
        "perplexity", found.value, found.stderr, found.windows, found.tokens, seconds, found.losses
    )


def _checkpoint(path: str | Path) -> dict[str, Any]:
    return {"path": str(path), "bytes": bytes_on_disk(path)}


def _entry(name: str, measured: Measured) -> dict[str, Any]:
    """One task in the result. Recovery: the share of the baseline's quality that is kept."""
    score, baseline = measured.model[name], measured.baseline.get(name)
    moved = measured.divergence.get(name)
    text = score.metric == "perplexity"
    recovery = None
    if baseline is not None and text:
        recovery = exp_difference(baseline.observations, score.observations)
    elif baseline is not None:
        recovery = ratio_of_means([(score.observations, baseline.observations)])
    return {
        "name": name,
        "title": task_of(name).title,
        "kind": "text" if text else "zero_shot",
        "metric": score.metric,
        "higher_is_better": not text,
        "model": _numbers(score),
        "baseline": None if baseline is None else _numbers(baseline),
        "recovery": _estimate(recovery),
        "kl": _estimate(moved.kl) if moved else None,
        "agreement": _estimate(moved.agreement) if moved else None,
    }


def _numbers(score: Score) -> dict[str, Any]:
    return {
        "value": score.value,
        "stderr": score.stderr,
        "samples": score.samples,
        "tokens": score.tokens,
        "seconds": score.seconds,
    }


def _estimate(estimate: Estimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    return {"value": estimate.value, "stderr": estimate.stderr}


def _mean_recovery(request: EvalRequest, measured: Measured) -> dict[str, Any] | None:
    """Mean zero-shot score over the baseline's. A mean of ratios would be dominated by the
    hardest task, on which the baseline's score is near 0."""
    if not request.zero_shot or not measured.baseline:
        return None
    pairs = [
        (measured.model[name].observations, measured.baseline[name].observations)
        for name in request.zero_shot
    ]
    return _estimate(ratio_of_means(pairs))
