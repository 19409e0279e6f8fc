"""What a 4-bit KV cache needs to know of a model's K and V: read from the file beside the
checkpoint, or, for the rotation, found when the model loads."""

from importlib import resources
from pathlib import Path
from typing import Any

import torch

from billfish.checkpoints.kv_file import KV_FILE, read_kv
from billfish.engine.kv.cache import ChannelRange
from billfish.engine.kv.rotation import SEQUENCES, TOKENS, Rotation, find_rotation
from billfish.errors import UserError
from billfish.models.decoder import Decoder


def rotation_of(source: Any, decoder: Decoder, tokenizer: Any, longest: int) -> Rotation:
    """kv4's rotation, as the checkpoint has it; else found now on the package's sample text, for
    sequences of up to `longest` tokens: some seconds for SmolLM2 on a CPU. `source` is the
    checkpoint's path, or a model in memory."""
    if (file := _file(source)) is not None:
        try:
            return Rotation.from_tensors(read_kv(file), decoder.shape).to(decoder.device)
        except RuntimeError:  # LinAlgError
            raise UserError(f"{file}: kv_turn has no inverse. Calibrate again.") from None
    size = min(TOKENS, decoder.shape.context)
    count = SEQUENCES * size
    if len(tokenizer):
        sample = resources.files("billfish").joinpath("data/sample_calibration.txt")
        ids = tokenizer(sample.read_text(encoding="utf-8")[: SEQUENCES * TOKENS * 8]).input_ids
    else:  # of a random model
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(decoder.shape.vocabulary, (count,), generator=random).tolist()
    sequences = [ids[i : i + size] for i in range(0, min(count, len(ids)), size)]
    return find_rotation(decoder, sequences, longest)


def stored_ranges(source: Any) -> ChannelRange:
    """kv4-channel's ranges, which only a calibration gives."""
    file = _file(source)
    if file is None:
        raise UserError(
            f"kv4-channel needs the ranges of K and V that a calibration finds, in {KV_FILE} of "
            "the checkpoint. `billfish quantize --kv kv4 --data FILE` writes it; kv4 needs none."
        )
    return ChannelRange.from_tensors(read_kv(file))


def _file(source: Any) -> Path | None:
    file = Path(source) / KV_FILE if isinstance(source, str | Path) else None
    return file if file is not None and file.exists() else None
