"""quantization_report.json: how a checkpoint was made (docs/FORMAT.md, section 5)."""

from pathlib import Path
from typing import Any

from billfish.checkpoints.tensors import counts
from billfish.models.compute import name_of
from billfish.offline.experts import rarely_reached
from billfish.offline.head import head_facts
from billfish.offline.provenance import versions
from billfish.offline.task import Task
from billfish.offline.text import Calibration
from billfish.schemes.base import Scheme, Solved, bits_per_weight
from billfish.schemes.registry import fields

REPORT = "quantization_report.json"


def layer_entry(
    task: Task, scheme: Scheme, name: str, n: int, k: int, solved: Solved
) -> dict[str, Any]:
    """Of one packed linear."""
    return {
        "name": name,
        "n": n,
        "k": k,
        "bits_per_weight": round(bits_per_weight(scheme, n, k, task.stored_dtype), 4),
        "error": solved.error,
        "note": solved.note,
    }


def make_report(
    task: Task,
    data: Calibration | None,
    layers: list[dict[str, Any]],
    training: dict[str, Any] | None,
    check: dict[str, Any] | None,  # of the sentinel; None: it did not run
    bytes_after: int,
) -> dict[str, Any]:
    request = task.request
    report = {
        "scheme": fields(task.scheme),
        "method": request.method,
        "seed": request.seed,
        "dtype": name_of(task.stored_dtype),
        "calibration": None
        if data is None
        else {
            "source": Path(data.source).name,
            "sha256": data.sha256,
            "nsamples": len(data.sequences),
            "seqlen": request.seqlen,
            "tokens": data.tokens,
        },
        "layers": layers,
        "training": training,
        "check": check,
        "tensors": counts(task.placed),
        "skipped": task.skipped,
        "warnings": [*task.warnings, *rarely_reached(layers)],
        "bytes_before": task.source.nbytes,
        "bytes_after": bytes_after,
        "versions": versions(),
        "fingerprint": task.fingerprint(),
    }
    if task.head is not None:
        report["head"] = head_facts(task, task.head)
    return report
