"""Draws docs/bench/bits.png from docs/bench/smollm2-bits.json: perplexity by true bits, a line for
each scheme and method.

    python scripts/bits.py
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

from billfish.bench.plot import COLOURS, INK, MARKERS, save

BENCH = Path(__file__).parents[1] / "docs" / "bench"
NAMES = {"w4a16": "2, 3 and 4 bits in groups of 64", "w2416": "w2416"}
METHODS = {"gptq": "GPTQ", "finetune": "finetune"}
MOST = 34  # 2 bits with GPTQ, 59.5, would leave no room for the others


def figure(told: dict) -> Figure:
    made = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = made.subplots()
    lines = [(scheme, method) for scheme in NAMES for method in METHODS]
    for place, (scheme, method) in enumerate(lines):
        points = [
            (each["true_bits"], each["test"])
            for each in told["results"]
            if (each["scheme"], each["method"]) == (scheme, method)
        ]
        shown = [(bits, value) for bits, value in points if value <= MOST]
        for bits, value in sorted(set(points) - set(shown)):
            axes.annotate(f"{value:.1f} ↑", (bits, MOST), ha="center", va="top", color=INK)
        axes.plot(
            *zip(*shown, strict=True),
            "-" if method == "finetune" else "--",
            marker=MARKERS[place],
            color=COLOURS[list(NAMES).index(scheme)],
            label=f"{NAMES[scheme]}, {METHODS[method]}",
        )
    axes.axhline(told["original"]["test"], color=INK, linewidth=1)
    axes.annotate("original", (4.25, told["original"]["test"]), va="bottom", ha="right", color=INK)
    axes.set_xlabel("true bits per weight, everything stored counted")
    axes.set_ylabel("perplexity, WikiText-2 test")
    axes.set_ylim(20, MOST)
    axes.grid(True, color="#DDDDDD", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title("SmolLM2-135M", color=INK)
    return made


if __name__ == "__main__":
    save(figure(json.loads((BENCH / "smollm2-bits.json").read_text())), BENCH / "bits.png")
