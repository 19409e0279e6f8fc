"""What a calibration text tells of K and V, stored beside a checkpoint: `quantize --kv kv4`.

The finished model reads the text as the engine would run it. Two modes of the 4-bit cache come from
it: the turn of K (kv4), and COMET's ranges of every channel (kv4-channel).
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from billfish.calibration import calibration
from billfish.engine.cache import ChannelRange
from billfish.engine.calibrated import KV_FILE
from billfish.engine.turn import TOKENS, calibrate
from billfish.models.checkpoint import write_atomically, write_manifest
from billfish.models.decoder import Decoder
from billfish.models.load import load

SAMPLES = 8  # texts of 512 tokens: twice what a model without this takes when it is loaded


@torch.inference_mode()
def calibrate_kv(
    path: Path, data: str, seed: int, device: str = "cpu", dtype: str = "auto"
) -> dict[str, Any]:
    """Writes the file, and the manifest anew; says what it did."""
    model, tokenizer = load(path, dtype, device)
    decoder = Decoder.of(model)
    shape = decoder.shape
    given = calibration(data, tokenizer, SAMPLES, min(TOKENS, shape.context), seed)
    ranges = ChannelRange.empty(shape.layers, shape.kv_heads, shape.head_dim, decoder.device)
    texts = [text.tolist() for text in given.sequences]
    turn = calibrate(decoder, texts, shape.context, ranges.update)
    tensors = {**turn.tensors(), **ranges.tensors()}
    kept = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path / KV_FILE, lambda place: save_file(kept, place))
    write_manifest(path)
    return {"file": KV_FILE, "data": data, "sha256": given.sha256, "tokens": given.tokens}
