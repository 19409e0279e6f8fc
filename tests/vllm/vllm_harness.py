"""vLLM in an environment of its own (scripts/test_vllm.sh, worker.py), and models to compare it on.

vLLM and Billfish round differently, so the tokens of a random model would differ by chance. A
small model therefore gets a head, solved by least squares, that makes it recite random tokens, each
far ahead of the next candidate: rounding changes none of them, a file read wrongly does.
"""

import atexit
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import character_tokenizer
from transformers import AutoModelForCausalLM

import billfish
from billfish import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("BILLFISH_VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python"))
LOGIT = 8.5  # of the recited token, 0 for all others: probability one half
CONTEXT = 256


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of every prompt, and what the model thought of them."""

    tokens: list[list[int]]
    logprobs: torch.Tensor  # (prompts, new) of the tokens

    def differs_by(self, other: "Answer") -> float:
        return float((self.logprobs - other.logprobs).abs().max())


class Failed(Exception):
    """vLLM did not answer; the text is what it said."""


def recited(prompts: int, prompt: int, new: int, vocabulary: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(1)
    return torch.randint(3, vocabulary, (prompts, prompt + new), generator=source)


def head_that_recites(states: torch.Tensor, tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The weight of a head that gives each token at its hidden state; (vocabulary, hidden)."""
    wanted = torch.nn.functional.one_hot(tokens.flatten(), vocabulary)
    return (LOGIT * torch.linalg.pinv(states.double()) @ wanted.double()).T


def teach(directory: Path, sequences: torch.Tensor, prompt: int) -> None:
    """Replace the dense head of a checkpoint by one that recites what follows the prompts."""
    trunk = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).model
    with torch.inference_mode():
        states = trunk(sequences).last_hidden_state[:, prompt - 1 : -1].flatten(0, 1)
    name = "lm_head.weight"
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = load_file(directory / index[name])
    head = head_that_recites(states, sequences[:, prompt:], len(tensors[name]))
    tensors[name] = head.to(tensors[name].dtype).contiguous()
    save_file(tensors, directory / index[name], metadata={"format": "pt"})


def engine(directory: Path, prompts: list[list[int]], new: int) -> Answer:
    """The answer of Billfish's own engine, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assert any(type(m) is billfish.models.linear.QuantLinear for m in model.modules())
    greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, logprobs=0)
    with LLM.of(model, character_tokenizer(), max_model_len=CONTEXT) as llm:
        outputs = [request.outputs[0] for request in llm.generate(prompts, greedy)]
    logprobs = [[step.logprob for step in output.logprobs] for output in outputs]
    return Answer([list(output.token_ids) for output in outputs], torch.tensor(logprobs))


@cache
def _worker() -> subprocess.Popen:
    if not Path(PYTHON).exists():
        pytest.fail(f"{PYTHON} is missing: run make test-vllm, or set BILLFISH_VLLM_PYTHON.")
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_INT4_W4A8": "0",  # by default it also rounds activations, to int8
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    worker = subprocess.Popen(
        [PYTHON, str(Path(__file__).with_name("worker.py"))],
        env=inherited | settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    atexit.register(worker.stdin.close)  # which ends it
    return worker


def vllm(
    directory: Path, prompts: list[list[int]], new: int, tensor_parallel: int = 1, **settings
) -> Answer:
    """vLLM's answer; `settings` are arguments of vllm.LLM, but `plugins`: False for stock vLLM."""
    what = {"prompts": prompts, "tokens": new}
    answer = _ask(directory, tensor_parallel, what, settings)
    return Answer(answer["tokens"], torch.tensor(answer["logprobs"]))


def loaded(directory: Path, file: Path, tensor_parallel: int = 1, **settings) -> list[dict]:
    """What stock vLLM loads: the parameters of each rank."""
    _ask(directory, tensor_parallel, {"parameters": str(file)}, {"plugins": False, **settings})
    return [load_file(f"{file}-{rank}") for rank in range(tensor_parallel)]


def _ask(directory: Path, tensor_parallel: int, what: dict, settings: dict) -> dict:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < tensor_parallel:
        pytest.skip(f"tensor parallel {tensor_parallel} needs as many CPUs; here are {len(cpus)}")
    given = dict(settings)
    plugins = "billfish" if given.pop("plugins", True) else ""
    usual = {
        "model": str(directory),
        "tensor_parallel_size": tensor_parallel,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": CONTEXT,  # of the first step, which measures memory
    }
    binding = "|".join(map(str, cpus[:tensor_parallel]))
    environment = {"VLLM_CPU_OMP_THREADS_BIND": binding, "VLLM_PLUGINS": plugins}
    with tempfile.NamedTemporaryFile("r") as log:
        job = {"settings": usual | given, "environment": environment, "log": log.name, **what}
        worker = _worker()
        print(json.dumps(job), file=worker.stdin, flush=True)
        line = worker.stdout.readline()
        answer = json.loads(line) if line else {"error": "the worker ended"}
        if "error" in answer:
            raise Failed(f"vLLM on {directory}: {answer['error']}\n{log.read()[-8000:]}")
    return answer
