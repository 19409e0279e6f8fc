"""What a calibration found about K and V of a model: stored beside it, or made when it loads."""

from importlib import resources
from pathlib import Path
from typing import Any

import torch

from billfish.checkpoints.kv_file import KV_FILE, read_kv
from billfish.engine.kv.cache import ChannelRange
from billfish.engine.kv.rotation import TEXTS, TOKENS, Turn, calibrate
from billfish.errors import UserError
from billfish.models.decoder import Decoder


def turn_of(source: Any, decoder: Decoder, tokenizer: Any, far: int) -> Turn:
    """kv4's turn, as the checkpoint has it; else made now from a text that the package brings:
    some seconds for SmolLM2 on a CPU, for texts of up to `far` tokens. `source` may be no path but
    a model."""
    if (file := _file(source)) is not None:
        try:
            return Turn.from_tensors(read_kv(file), decoder.shape).to(decoder.device)
        except RuntimeError:  # LinAlgError
            raise UserError(f"{file}: kv_turn has no inverse. Calibrate again.") from None
    size = min(TOKENS, decoder.shape.context)
    if len(tokenizer):
        sample = resources.files("billfish").joinpath("data/sample_calibration.txt")
        ids = tokenizer(sample.read_text(encoding="utf-8")[: TEXTS * TOKENS * 8]).input_ids
    else:  # a random model's
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(decoder.shape.vocabulary, (TEXTS * size,), generator=random).tolist()
    texts = [ids[i * size : (i + 1) * size] for i in range(TEXTS)]
    return calibrate(decoder, [text for text in texts if text], far)


def stored_ranges(source: Any) -> ChannelRange:
    """kv4-channel's, which nothing can replace."""
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
