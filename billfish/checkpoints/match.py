"""Checks that the tensors in the files match the model of config.json one to one.

transformers itself does the matching, with its renamed and tied weights and its lists of optional
keys, on tensors on the meta device. So parameters that it would initialize randomly, and tensors
that it would not read, are known before weights are loaded. Packed linears appear here as dense.
"""

import copy
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from threading import RLock
from typing import Any

import torch
import transformers  # classes are accessed late: it may be half imported
from transformers.utils import logging

from billfish.checkpoints.config import GENERATION
from billfish.checkpoints.experts import fused, unequal
from billfish.checkpoints.read import Checkpoint
from billfish.errors import UserError

POOLER = re.compile(r"\bpooler\b")  # sentence-transformers checkpoints leave it out, unused
Problem = tuple[str, str]  # name of a tensor, and a sentence about it
IN_FILES = "is in the files"
# Held while transformers builds a model. It patches PreTrainedModel meanwhile: two threads that
# restore it in the wrong order leave every later model of the process without tied weights.
BUILDING = RLock()


def architecture(checkpoint: Checkpoint) -> Any:
    """The model class that config.json names."""
    name = next(iter(checkpoint.config.get("architectures") or []), "not given")
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise UserError(
            f"{checkpoint.path / 'config.json'}: architectures: {name!r} is no model of "
            f"transformers {transformers.__version__}."
        )
    return found


def model_config(checkpoint: Checkpoint) -> Any:
    """config.json as transformers reads it."""
    kind = checkpoint.config.get("model_type")
    try:
        return transformers.AutoConfig.from_pretrained(
            checkpoint.path, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers raises many types
        raise UserError(
            f"{checkpoint.path / 'config.json'}: transformers {transformers.__version__} cannot "
            f"read it as model_type {kind!r}: {cause(error)}"
        ) from error


def check_generation(path: Path) -> None:
    """Raise if there is a generation_config.json that transformers cannot read."""
    if (path / GENERATION).exists():
        try:
            transformers.GenerationConfig.from_pretrained(path, local_files_only=True)
        except Exception as error:  # as above
            raise UserError(f"{path / GENERATION}: cannot be used: {cause(error)}") from error


def problems(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    spare: Container[str] = (),
    model_class: Any = None,
    config: Any = None,
) -> list[Problem]:
    """Differences between the tensors `shapes` and the model (by default the causal LM of the
    config). The model may lack tensors in `spare`. Nothing is allocated, however large the
    model."""
    config = copy.deepcopy(config or model_config(checkpoint))
    if model_class is None:
        model_class, config = causal(checkpoint, config)
    if not isinstance(config, model_class.config_class or object):
        raise UserError(
            f"{checkpoint.path / 'config.json'}: model_type {config.model_type!r} is not that of "
            f"{model_class.__name__}, which it names in architectures."
        )
    config.__dict__.pop("quantization_config", None)
    if wrong := unequal(shapes, getattr(config, "text_config", config)):
        return wrong
    shapes = fused(shapes, getattr(config, "model_type", None))
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        with BUILDING, quiet():
            _, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=torch.float32,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # invalid sizes may raise anything
        raise UserError(
            f"{checkpoint.path / 'config.json'}: transformers cannot build "
            f"{model_class.__name__} from it: {cause(error)}"
        ) from error
    return differences(info, model_class.__name__, spare)


def causal(checkpoint: Checkpoint, config: Any) -> tuple[Any, Any]:
    """The class that AutoModelForCausalLM chooses for a config, and the config that it passes."""
    found: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None:
        raise UserError(
            f"{checkpoint.path / 'config.json'}: model_type {config.model_type!r} is no causal LM "
            f"of transformers {transformers.__version__}: it cannot write text."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{checkpoint.path}: encoder-decoder models are not supported.")
    if isinstance(found, tuple | list):
        told = config.architectures or ()
        found = next((one for one in found if one.__name__ in told), found[0])
    text = getattr(config, "sub_configs", {}).get("text_config")
    return found, config.get_text_config() if found.config_class == text else config


def differences(info: Mapping[str, Any], model: str, spare: Container[str] = ()) -> list[Problem]:
    """transformers' loading info as sentences; empty if everything matches."""
    wrong = [
        (name, f"has shape {tuple(found)}, {model} has {tuple(wanted)} there.")
        for name, found, wanted in sorted(info["mismatched_keys"])
    ]
    missing = [
        (name, f"missing: {model} needs it, no file holds it, and it would be random.")
        for name in sorted(info["missing_keys"])
        if not POOLER.search(name)
    ]
    more = [
        (name, f"{IN_FILES}, and {model} has no such tensor.")
        for name in sorted(info["unexpected_keys"])
        if name not in spare
    ]
    return wrong + missing + more


def parts_of_their_own(checkpoint: Checkpoint, found: list[Problem]) -> set[str]:
    """Tensors in the files that the model lacks and does not miss: whole modules beside its own (a
    draft for speculative decoding, a head of training). Tensors inside its blocks, more blocks than
    config.json says and parameters of its own modules are none: a config of another model."""
    lacking = {name for name, told in found if told.startswith(IN_FILES)}
    known = {path for name in checkpoint if name not in lacking for path in _paths(name)}
    own = set()
    for name in lacking:
        inside = [path for path in _paths(name) if path in known]
        beside = name.removeprefix(inside[-1] + ".") if inside else name
        first, dot, _ = beside.partition(".")
        numbered = any(part.isdigit() for path in inside for part in path.split("."))
        if dot and not first.isdigit() and not numbered:
            own.add(name)
    return own


def _paths(name: str) -> list[str]:
    """The modules that a tensor is in, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def refuse(checkpoint: Checkpoint, found: list[Problem]) -> None:
    if found:
        name, sentence = found[0]
        others = f" {len(found) - 1} more do not fit, next {found[1][0]!r}." if found[1:] else ""
        held = checkpoint.entries.get(name)
        raise UserError(
            f"{checkpoint.path / held.file if held else checkpoint.path}: {name!r} {sentence}"
            f"{others} The checkpoint is incomplete, or its config.json belongs to another."
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' loading report, which would be about the meta model."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def cause(error: BaseException) -> str:
    """An exception of another library as part of a sentence."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
