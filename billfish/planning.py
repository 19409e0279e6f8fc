"""What quantizing would do, before any work: sizes, true bits, tensor parallelism, estimated costs.

Sizes are exact: the scheme says what it stores before data exists. Whatever the job would refuse is
refused here, by building the job and reading its calibration text; only the weights themselves are
not read. Results are plain dicts; nothing is written.
"""

import re
import shutil
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from billfish.compute import name_of
from billfish.costs import Linear, estimate
from billfish.driver import Job
from billfish.models.hf import Checkpoint, read_json
from billfish.models.unfinished import SETTINGS
from billfish.request import Request
from billfish.schemes.w4a16 import W4A16

DEGREES = (1, 2, 4, 8)
MEMORY = Path("/proc/meminfo")


def plan(request: Request) -> dict[str, Any]:
    """Raises what the job would raise; writes nothing."""
    source = Checkpoint(request.model)
    job = Job(request, source)
    data = job._calibration()
    linears = find_linears(job)
    rows = [layer_row(job, linear) for linear in linears]
    sizes = result_bytes(job)
    parameters = sum(prod(entry.shape) for entry in source.entries.values())
    made = [row for row in rows if row["skip"] is None]
    weights = sum(row["n"] * row["k"] for row in made)
    tokens = 0 if data is None else data.tokens
    estimates = estimate(job, linears, tokens, sum(sizes.values()))
    return {
        "model": str(request.model),
        "output": str(request.output),
        "architecture": type(job.model.model).__name__,
        "method": request.method,
        "scheme": {"name": job.scheme.name, **asdict(job.scheme)},
        "stored_dtype": name_of(job.stored_dtype),
        "dtype": name_of(job.dtype),
        "device": str(job.device),
        "calibration": None if data is None else {
            "source": data.source, "sequences": len(data.sequences), "tokens": tokens,
        },
        "layers": rows,
        "totals": {
            "linears": len(rows),
            "quantized": len(made),
            "skipped": len(rows) - len(made),
            "parameters": parameters,
            "quantized_parameters": weights,
            "bytes_before": source.nbytes,
            "bytes_after": sum(sizes.values()),
            "bits_per_weight": sum(row["bytes_after"] for row in made) * 8 / weights,
            "model_bits_per_weight": sum(sizes.values()) * 8 / parameters,
        },
        "tp": model_degrees(job, linears),
        "estimates": estimates,
        "warnings": warnings(job, estimates),
    }  # fmt: skip


# -- layers


def find_linears(job: Job) -> list[Linear]:
    model = job.model.model
    text = model.config.get_text_config()
    styles = {**(getattr(text, "base_model_tp_plan", None) or {}), **(model._tp_plan or {})}
    return [
        Linear(module, n, k, reason, parallel_way(module, styles))
        for module, n, k, reason in job.linear_fates()
    ]


def parallel_way(module: str, styles: dict[str, str]) -> str | None:
    """Which dimension a transformers TP plan cuts. Its names vary between versions (colwise_rep,
    colwise_gather_output, rowwise_split_input), what they begin or end with does not."""
    name = "." + re.sub(r"\.\d+(?=\.|$)", ".*", module)
    style = next((style for key, style in styles.items() if name.endswith("." + key)), "")
    if "colwise" in style:
        return "2n" if style.startswith("packed") else "n"
    if "rowwise" in style:
        return "k"
    return "whole" if style.startswith("replicate") or style == "mla_kv_a_proj" else None


def layer_row(job: Job, linear: Linear) -> dict[str, Any]:
    n, k, scheme = linear.n, linear.k, job.scheme
    stored = job.model.stored.get(f"{linear.module}.weight")  # None: tied to another tensor
    before = 0 if stored is None else job.source.entries[stored].nbytes
    parts = {"weight": n * k * job.stored_dtype.itemsize if stored else 0}
    if linear.skip is None:
        parts = {part: spec.nbytes for part, spec in scheme.tensors(n, k, job.stored_dtype).items()}
    dense = job.stored_dtype.itemsize * 8.0
    return {
        "module": linear.module,
        "n": n,
        "k": k,
        "scheme": scheme.name if linear.skip is None else None,
        "skip": linear.skip,
        "bits_per_weight": dense if linear.skip else scheme.bits_per_weight(n, k, job.stored_dtype),
        "bytes_before": before,
        "bytes_after": sum(parts.values()),
        "stored": parts,
        "tp": [tp for tp in DEGREES if obstacle(linear, tp, scheme) is None],
    }


def result_bytes(job: Job) -> dict[str, int]:
    """Bytes of what each tensor of the source becomes."""
    packed = {
        job.model.stored[f"{module}.weight"]: sum(
            spec.nbytes for spec in job.scheme.tensors(n, k, job.stored_dtype).values()
        )
        for module, n, k, skip in job.linear_fates()
        if skip is None
    }
    return {
        name: packed[name] if name in packed
        else prod(entry.shape) * job.stored_dtype.itemsize if entry.dtype.is_floating_point
        else entry.nbytes
        for name, entry in job.source.entries.items()
    }  # fmt: skip


# -- tensor parallelism


def obstacle(linear: Linear, tp: int, scheme: W4A16) -> str | None:
    """Why a linear cannot be cut into `tp` shards as its model is cut, or None."""
    if tp == 1 or linear.way == "whole":
        return None
    packed = scheme if linear.skip is None else None
    pieces = 2 if linear.way == "2n" else 1
    along_n = None if linear.way == "k" else column_obstacle(linear.n, tp * pieces, packed)
    along_k = None if linear.way in ("n", "2n") else row_obstacle(linear.k, tp, packed)
    return along_n or along_k


def column_obstacle(n: int, tp: int, scheme: W4A16 | None) -> str | None:
    if n % tp:
        return f"its {n} outputs do not split into {tp}"
    if scheme and not scheme.symmetric and n // tp * scheme.bits % 32:
        return f"{n // tp} zero points of {scheme.bits} bits do not fill 32-bit words"
    return None


def row_obstacle(k: int, tp: int, scheme: W4A16 | None) -> str | None:
    if k % tp:
        return f"its {k} inputs do not split into {tp}"
    if scheme and scheme.group_size != -1 and k // tp % scheme.group_size:
        return f"{k // tp} inputs are not whole groups of {scheme.group_size}"
    if scheme and k // tp * scheme.bits % 32:
        return f"{k // tp} codes of {scheme.bits} bits do not fill 32-bit words"
    return None


def model_degrees(job: Job, linears: list[Linear]) -> dict[str, Any]:
    """Degrees at which all blocks can be cut. What is outside them, engines pad or copy."""
    reasons: dict[str, str] = {}
    config = job.model.model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None)
    inside = [linear for linear in linears if linear.module.startswith(job.model.prefix + ".")]
    for tp in DEGREES[1:]:
        found = ((linear.module, obstacle(linear, tp, job.scheme)) for linear in inside)
        first = next(((module, reason) for module, reason in found if reason), None)
        if heads and heads % tp:
            reasons[str(tp)] = f"{heads} attention heads do not split into {tp}."
        elif shared and shared % tp and tp % shared:
            reasons[str(tp)] = f"{shared} key-value heads neither split into {tp} nor divide it."
        elif first:
            reasons[str(tp)] = f"{first[0]}: {first[1]}."
    return {"possible": [tp for tp in DEGREES if str(tp) not in reasons], "impossible": reasons}


# -- warnings


def warnings(job: Job, estimates: dict[str, Any]) -> list[str]:
    """What may stop the job although nothing refuses it, a sentence each."""
    said = [job.warning] if job.warning else []
    output, state = job.output, job.state / SETTINGS
    if state.exists():
        job._same_job(read_json(state))
        said.append(f"{output}: holds an unfinished job of this request; quantize goes on with it.")
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        said.append(f"{output}: exists and is not empty. Give --fresh or another --output.")
    place = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    free, need = shutil.disk_usage(place).free, estimates["disk_bytes"]
    if free < need:
        said.append(f"{place}: {free / 1e9:.1f} GB are free, about {need / 1e9:.1f} GB are needed.")
    there, need = available_memory(), estimates["memory_bytes"]
    if job.model.device.type == "cpu" and there is not None and there < need:
        said.append(
            f"{there / 1e9:.1f} GB of memory are available, about {need / 1e9:.1f} GB are needed. "
            "Fewer --nsamples need less."
        )
    return said


def available_memory() -> int | None:
    """Bytes that Linux says can be had without swapping; None elsewhere."""
    if not MEMORY.exists():
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", MEMORY.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
