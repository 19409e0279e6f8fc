"""Prefill and decode of a packed model against its original, in one process, interleaved.

    python -m billfish.bench.generation PACKED ORIGINAL [PROMPT_TOKENS [NEW_TOKENS [ROUNDS]]]
                                        [--dtype float32]

Both run through transformers, in one type: that in which this CPU computes. Machines are shared
and noisy, so a claim about speed is a ratio of medians of one run; the JSON has every round.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from billfish.checkpoints.read import stored_dtype
from billfish.models.compute import DTYPES, compute_dtype, name_of
from billfish.models.linear import QuantLinear
from billfish.models.load import load_model


@dataclass
class Rounds:
    prefill_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)  # a token, the round's median


@torch.inference_mode()
def one_round(model: Any, prompt: torch.Tensor, new_tokens: int, into: Rounds) -> None:
    started = time.perf_counter()
    output = model(prompt, use_cache=True, logits_to_keep=1)
    into.prefill_seconds.append(time.perf_counter() - started)
    token, times = output.logits[:, -1:].argmax(-1), []
    for _ in range(new_tokens):
        started = time.perf_counter()
        output = model(token, past_key_values=output.past_key_values, use_cache=True)
        token = output.logits[:, -1:].argmax(-1)
        times.append(time.perf_counter() - started)
    into.decode_seconds.append(statistics.median(times))


def compare(
    packed: str,
    original: str,
    prompt_tokens: int = 512,
    new_tokens: int = 32,
    rounds: int = 7,
    dtype: str = "auto",
) -> dict[str, Any]:
    """Medians, ratios (above 1: the packed model is faster) and every round."""
    chosen = compute_dtype(stored_dtype(packed), "cpu", dtype)
    models = {
        name: load_model(path, chosen)
        for name, path in (("original", original), ("packed", packed))
    }
    size = models["original"].config.vocab_size
    prompt = torch.randint(0, size, (1, prompt_tokens), generator=torch.Generator().manual_seed(0))
    measured = {name: Rounds() for name in models}
    for index in range(rounds + 1):
        for name, model in models.items():
            into = Rounds() if index == 0 else measured[name]  # the first round warms up
            one_round(model, prompt, new_tokens, into)
    layers = [m for m in models["packed"].modules() if isinstance(m, QuantLinear)]
    dense = sum(2 * m.in_features * m.out_features for m in layers)
    medians = {
        name: {key: statistics.median(values) for key, values in asdict(found).items()}
        for name, found in measured.items()
    }
    ratio = {
        key: medians["original"][key] / medians["packed"][key]
        for key in ("prefill_seconds", "decode_seconds")
    }
    return {
        "prefill_ratio": ratio["prefill_seconds"],
        "decode_ratio": ratio["decode_seconds"],
        "decode_tokens_per_second": {n: 1 / m["decode_seconds"] for n, m in medians.items()},
        "weights_over_bf16": sum(m.nbytes() for m in layers) / dense,
        "dtype": name_of(chosen),
        "prompt_tokens": prompt_tokens,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rounds": {name: asdict(found) for name, found in measured.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packed")
    parser.add_argument("original")
    for name, usual in (("prompt_tokens", 512), ("new_tokens", 32), ("rounds", 7)):
        parser.add_argument(name, type=int, nargs="?", default=usual)
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto")
    print(json.dumps(compare(**vars(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
