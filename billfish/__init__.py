"""Billfish: few-bit LLMs at the speed of memory.

Importing this touches no GPU and no transformers; it only arranges that transformers, once
imported, runs packed checkpoints (ours, GPTQ, AWQ, compressed-tensors) through QuantLinear.
"""

from typing import Any

from billfish.errors import Interrupted, UserError
from billfish.integrations import register_when_imported
from billfish.version import __version__

__all__ = [
    "LLM",
    "Interrupted",
    "SamplingParams",
    "StructuredOutputsParams",
    "UserError",
    "__version__",
    "load",
    "quantize",
]

register_when_imported()


def __getattr__(name: str) -> Any:
    """The doors on first use: they import torch and transformers, which takes seconds."""
    if name == "quantize":
        from billfish.offline.driver import quantize

        return quantize
    if name == "load":
        from billfish.models.load import load

        return load
    if name == "LLM":
        from billfish.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from billfish.engine.sampling import SamplingParams

        return SamplingParams
    if name == "StructuredOutputsParams":
        from billfish.engine.structured import StructuredOutputsParams

        return StructuredOutputsParams
    raise AttributeError(f"module 'billfish' has no attribute {name!r}")
