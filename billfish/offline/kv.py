"""What a calibration text tells of K and V, stored beside a checkpoint: `quantize --kv kv4`.

The finished model reads the text as the engine would run it. Two modes of the 4-bit cache come from
it: the turn of K (kv4), and COMET's ranges of every channel (kv4-channel).
"""

from pathlib import Path
from typing import Any

import torch

from billfish.checkpoints.kv_file import KV_FILE
from billfish.checkpoints.write import write_shard
from billfish.engine.kv.cache import ChannelRange
from billfish.engine.kv.rotation import TOKENS, calibrate
from billfish.models.decoder import Decoder, family_of
from billfish.models.load import load
from billfish.offline.text import Calibration, calibration

SAMPLES = 8  # texts of 512 tokens: twice what a model without this takes when it is loaded


def check_kv(model: Any, tokenizer: Any, data: str, seed: int) -> None:
    """Raises, before any work, what would stop the calibration of a model after it."""
    family_of(model)
    _texts(data, tokenizer, model.config.max_position_embeddings, seed)


def _texts(data: str, tokenizer: Any, context: int, seed: int) -> Calibration:
    return calibration(data, tokenizer, SAMPLES, min(TOKENS, context), seed)


@torch.inference_mode()
def calibrate_kv(
    path: Path, data: str, seed: int, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Writes the file; says what it did."""
    model, tokenizer = load(path, dtype, device)
    decoder = Decoder.of(model)
    shape = decoder.shape
    given = _texts(data, tokenizer, shape.context, seed)
    ranges = ChannelRange.empty(shape.layers, shape.kv_heads, shape.head_dim, decoder.device)
    texts = [text.tolist() for text in given.sequences]
    turn = calibrate(decoder, texts, shape.context, ranges.update)
    tensors = {**turn.tensors(), **ranges.tensors()}
    kept = {name: tensor.cpu() for name, tensor in tensors.items()}
    write_shard(path / KV_FILE, kept)
    name = Path(given.source).name
    return {"file": KV_FILE, "data": name, "sha256": given.sha256, "tokens": given.tokens}
