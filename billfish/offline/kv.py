"""Calibrates the 4-bit KV cache and stores the result in the checkpoint: `quantize --kv kv4`.

The quantized model runs the calibration text as the engine would. The file serves two cache
formats: the rotation of K (kv4), and COMET's range of every channel (kv4-channel).
"""

from pathlib import Path
from typing import Any

import torch

from billfish.checkpoints.kv_file import KV_FILE
from billfish.checkpoints.write import write_shard
from billfish.engine.kv.cache import ChannelRange
from billfish.engine.kv.rotation import TOKENS, find_rotation
from billfish.models.decoder import Decoder
from billfish.models.families import family_of
from billfish.models.load import load
from billfish.offline.text import Calibration, calibration

SAMPLES = 8  # texts of 512 tokens: twice as many as the engine takes when it calibrates itself


def check_kv(model: Any, tokenizer: Any, data: str, seed: int) -> None:
    """Raise before quantizing what would make the KV calibration fail after it."""
    family_of(model)
    _calibration(data, tokenizer, model.config.max_position_embeddings, seed)


def _calibration(data: str, tokenizer: Any, context: int, seed: int) -> Calibration:
    return calibration(data, tokenizer, SAMPLES, min(TOKENS, context), seed)


@torch.inference_mode()
def write_kv_file(
    path: Path, data: str, seed: int, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Calibrate, write KV_FILE, and return the entry for the report."""
    model, tokenizer = load(path, dtype, device)
    decoder = Decoder.of(model)
    shape = decoder.shape
    given = _calibration(data, tokenizer, shape.context, seed)
    ranges = ChannelRange.empty(shape.layers, shape.kv_heads, shape.head_dim, decoder.device)
    sequences = [sequence.tolist() for sequence in given.sequences]
    rotation = find_rotation(decoder, sequences, shape.context, ranges.update)
    tensors = {**rotation.tensors(), **ranges.tensors()}
    kept = {name: tensor.cpu() for name, tensor in tensors.items()}
    write_shard(path / KV_FILE, kept)
    name = Path(given.source).name
    return {"file": KV_FILE, "data": name, "sha256": given.sha256, "tokens": given.tokens}
