"""Prefill and decode of a packed model against its original, both in transformers.

    python -m billfish.bench.generation PACKED ORIGINAL [PROMPT_TOKENS [NEW_TOKENS [ROUNDS]]]
                                        [--dtype float32]

This is the speed of AutoModelForCausalLM on a CPU; `billfish bench generate` measures the engine.
Both models run in one process, in turns and in one dtype. Machines are shared and noisy, so a
speed-up is a ratio of two medians of one run; the JSON has every round.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch

from billfish.checkpoints.read import stored_dtype
from billfish.models.compute import DTYPES, compute_dtype, name_of
from billfish.models.linear import QuantLinear
from billfish.models.load import load_model


@torch.inference_mode()
def one_round(model: Any, prompt: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """Seconds of prefill, and the median of those of a decode step."""
    step, cache, times = prompt, None, []
    for _ in range(new_tokens + 1):
        started = time.perf_counter()
        output = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        step, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
        times.append(time.perf_counter() - started)
    return times[0], statistics.median(times[1:])


def compare(
    packed: str,
    original: str,
    prompt_tokens: int = 512,
    new_tokens: int = 32,
    rounds: int = 7,
    dtype: str = "auto",
) -> dict[str, Any]:
    """Ratios of medians (above 1: the packed model is faster) and every round."""
    chosen = compute_dtype(stored_dtype(packed), "cpu", dtype)
    models = {"original": load_model(original, chosen), "packed": load_model(packed, chosen)}
    size = models["original"].config.vocab_size
    prompt = torch.randint(0, size, (1, prompt_tokens), generator=torch.Generator().manual_seed(0))
    turns = [
        {name: one_round(model, prompt, new_tokens) for name, model in models.items()}
        for _ in range(rounds + 1)
    ][1:]  # the first one warms up
    prefill, decode = ({name: [turn[name][i] for turn in turns] for name in models} for i in (0, 1))
    step = {name: statistics.median(times) for name, times in decode.items()}
    layers = [m for m in models["packed"].modules() if isinstance(m, QuantLinear)]
    dense = sum(2 * m.in_features * m.out_features for m in layers)
    return {
        "prefill_ratio": statistics.median(prefill["original"])
        / statistics.median(prefill["packed"]),
        "decode_ratio": step["original"] / step["packed"],
        "decode_tokens_per_second": {name: 1 / seconds for name, seconds in step.items()},
        "weights_over_bf16": sum(m.nbytes() for m in layers) / dense,
        "dtype": name_of(chosen),
        "prompt_tokens": prompt_tokens,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rounds": {
            name: {"prefill_seconds": prefill[name], "decode_seconds": decode[name]}
            for name in models
        },
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
