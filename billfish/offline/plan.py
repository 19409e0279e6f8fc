"""`billfish plan`: sizes, true bits a weight, tensor parallelism and estimated costs of a job.

Sizes are exact, because a scheme says what it stores for a shape. Building the task and reading the
calibration text raises here whatever the job would refuse, except for bad weights, which are not
read. Results are plain dicts; nothing is written.
"""

import re
import shutil
from math import prod
from pathlib import Path
from typing import Any

from billfish.checkpoints.config import read_json
from billfish.checkpoints.read import Checkpoint
from billfish.checkpoints.tensors import COPIED
from billfish.checkpoints.unfinished import JOB, SETTINGS
from billfish.models.compute import name_of
from billfish.models.experts import Experts
from billfish.offline.costs import Linear, estimate
from billfish.offline.head import head_facts
from billfish.offline.request import QuantizeRequest
from billfish.offline.task import Task
from billfish.schemes.base import Scheme, bits_per_weight
from billfish.schemes.registry import fields

DEGREES = (1, 2, 4, 8)
MEMORY = Path("/proc/meminfo")


def plan(request: QuantizeRequest) -> dict[str, Any]:
    """Report the job; raises what the job would raise."""
    source = Checkpoint(request.model)
    task = Task(request, source)
    data = task.read_calibration()
    linears = find_linears(task)
    rows = [layer_row(task, linear) for linear in linears]
    sizes = result_bytes(task)
    parameters = sum(prod(entry.shape) for entry in task.source.entries.values())
    made = [row for row in rows if row["skip"] is None]
    weights = sum(row["n"] * row["k"] for row in made)
    tokens = 0 if data is None else data.tokens
    estimates = estimate(task, linears, tokens, sum(sizes.values()))
    return {
        "model": str(request.model),
        "output": None if request.output is None else str(request.output),
        "architecture": type(task.model.model).__name__,
        "method": request.method,
        "training": task.training,
        "scheme": fields(task.scheme),
        "head": None if task.head is None else head_facts(task, task.head),
        "stored_dtype": name_of(task.stored_dtype),
        "dtype": name_of(task.dtype),
        "device": str(task.device),
        "calibration": None
        if data is None
        else {
            "source": data.source,
            "sequences": len(data.sequences),
            "tokens": tokens,
        },
        "layers": rows,
        "copied": [
            {"name": name, **each.fields(), "bytes": source.entries[name].nbytes}
            for name, each in task.placed.items()
            if each.how == COPIED
        ],
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
        "tp": model_degrees(task, linears),
        "estimates": estimates,
        "warnings": warnings(task, estimates),
    }


# -- layers


def find_linears(task: Task) -> list[Linear]:
    model = task.model.model
    text = model.config.get_text_config()
    styles = {**(getattr(text, "base_model_tp_plan", None) or {}), **(model._tp_plan or {})}
    experts = {name: m for name, m in model.named_modules() if isinstance(m, Experts)}
    active = getattr(text, "num_experts_per_tok", None)
    found = []
    for module, n, k, reason in task.select_linears():
        owner = experts.get(module.rsplit(".", 2)[0])
        if owner is None:
            found.append(Linear(module, n, k, reason, tp_axis(module, styles)))
        else:  # split like a dense MLP's, whatever transformers' plan says of the fused ones
            axis = "k" if module.endswith(f".{owner.leaves[2]}") else "n"
            share = active / owner.count if isinstance(active, int) else 1.0
            found.append(Linear(module, n, k, reason, axis, min(share, 1.0)))
    return found


def tp_axis(module: str, styles: dict[str, str]) -> str | None:
    """The dimension that a transformers TP plan splits (Linear.tp_axis). Names of styles vary
    between versions (colwise_rep, colwise_gather_output, rowwise_split_input); only their stable
    part is compared."""
    name = "." + re.sub(r"\.\d+(?=\.|$)", ".*", module)
    style = next((style for key, style in styles.items() if name.endswith("." + key)), "")
    if "colwise" in style:
        return "2n" if style.startswith("packed") else "n"
    if "rowwise" in style:
        return "k"
    return "whole" if style.startswith("replicate") or style == "mla_kv_a_proj" else None


def layer_row(task: Task, linear: Linear) -> dict[str, Any]:
    n, k, scheme = linear.n, linear.k, task.scheme_of(linear.module)
    stored = task.model.stored.get(f"{linear.module}.weight")  # None: tied to another tensor
    before = 0 if stored is None else task.source.entries[stored].nbytes
    parts = {"weight": n * k * task.stored_dtype.itemsize if stored else 0}
    if linear.skip is None:
        parts = {
            part: spec.nbytes for part, spec in scheme.tensors(n, k, task.stored_dtype).items()
        }
    bits = task.stored_dtype.itemsize * 8.0
    if linear.skip is None:
        bits = bits_per_weight(scheme, n, k, task.stored_dtype)
    return {
        "module": linear.module,
        "n": n,
        "k": k,
        "scheme": scheme.name if linear.skip is None else None,
        "skip": linear.skip,
        "bits_per_weight": bits,
        "bytes_before": before,
        "bytes_after": sum(parts.values()),
        "stored": parts,
        "tp": [tp for tp in DEGREES if obstacle(linear, tp, scheme) is None],
    }


def result_bytes(task: Task) -> dict[str, int]:
    """Weight, by its name in the source, or in the model if that has none -> its bytes in the
    result. A packed head that was tied has none, and is stored beside the embedding."""
    width, sizes = task.stored_dtype.itemsize, {}
    copied = {name for name, each in task.placed.items() if each.how == COPIED}
    for name, entry in task.source.entries.items():
        cast = name not in copied and entry.dtype.is_floating_point
        sizes[name] = prod(entry.shape) * width if cast else entry.nbytes
    for module, n, k, skip in task.select_linears():
        if skip is None:
            weight = f"{module}.weight"
            specs = task.scheme_of(module).tensors(n, k, task.stored_dtype).values()
            sizes[task.model.stored.get(weight, weight)] = sum(spec.nbytes for spec in specs)
    return sizes


# -- tensor parallelism


def obstacle(linear: Linear, tp: int, scheme: Scheme) -> str | None:
    """Why a linear cannot be split into `tp` shards along its tp_axis, or None."""
    if tp == 1 or linear.tp_axis == "whole":
        return None
    packed = scheme if linear.skip is None else None
    pieces = 2 if linear.tp_axis == "2n" else 1
    along_n = None if linear.tp_axis == "k" else cut_obstacle(linear.n, tp * pieces, 0, packed)
    along_k = None if linear.tp_axis in ("n", "2n") else cut_obstacle(linear.k, tp, 1, packed)
    return along_n or along_k


def cut_obstacle(size: int, parts: int, dim: int, scheme: Scheme | None) -> str | None:
    """Why `size` outputs (dim 0) or inputs (dim 1) cannot be split into equal parts, or None."""
    if size % parts:
        return f"its {size} {('outputs', 'inputs')[dim]} do not split into {parts}"
    return None if scheme is None else scheme.refuses_cut(dim, size // parts, size)


def model_degrees(task: Task, linears: list[Linear]) -> dict[str, Any]:
    """Degrees at which all blocks can be split. Engines pad or replicate embeddings and head."""
    reasons: dict[str, str] = {}
    config = task.model.model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None)
    inside = [linear for linear in linears if linear.module.startswith(task.model.prefix + ".")]
    for tp in DEGREES[1:]:
        found = ((linear.module, obstacle(linear, tp, task.scheme)) for linear in inside)
        first = next(((module, reason) for module, reason in found if reason), None)
        if heads and heads % tp:
            reasons[str(tp)] = f"{heads} attention heads do not split into {tp}."
        elif shared and shared % tp and tp % shared:
            reasons[str(tp)] = f"{shared} key-value heads neither split into {tp} nor divide it."
        elif first:
            reasons[str(tp)] = f"{first[0]}: {first[1]}."
    return {"possible": [tp for tp in DEGREES if str(tp) not in reasons], "impossible": reasons}


# -- warnings


def warnings(task: Task, estimates: dict[str, Any]) -> list[str]:
    """Sentences about what may stop the job although it is not refused."""
    said = [*task.warnings]
    output = task.request.output
    if output is not None:
        said += output_warnings(task, output)
    output = output or Path()
    place = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    free, need = shutil.disk_usage(place).free, estimates["disk_bytes"]
    if free < need:
        said.append(f"{place}: {free / 1e9:.1f} GB are free, about {need / 1e9:.1f} GB are needed.")
    there, need = available_memory(), estimates["memory_bytes"]
    if task.model.device.type == "cpu" and there is not None and there < need:
        said.append(
            f"{there / 1e9:.1f} GB of memory are available, about {need / 1e9:.1f} GB are needed. "
            "Fewer --nsamples need less."
        )
    return said


def output_warnings(task: Task, output: Path) -> list[str]:
    """A warning if the output directory exists and is not empty."""
    state = output / JOB / SETTINGS
    if state.exists():
        task.same_job(read_json(state), output)
        return [f"{output}: holds an unfinished job of this request; quantize goes on with it."]
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        return [f"{output}: exists and is not empty. Give --fresh or another --output."]
    return []


def available_memory() -> int | None:
    """Bytes that Linux can give without swapping; None on other systems."""
    if not MEMORY.exists():
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", MEMORY.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
