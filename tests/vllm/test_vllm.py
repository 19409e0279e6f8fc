"""Checkpoints of our quantizer in stock vLLM: they load unchanged and give the same greedy tokens.

Ours is transformers with QuantLinear. Both compute in bf16 and round differently, so a small Llama
recites 192 random tokens (vllm_harness.py); test_faults_are_seen shows what a file read wrongly
does. SmolLM2 speaks freely and is compared up to its first near-tie.
"""

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from vllm_harness import LOGIT, Answer, recited, teach, vllm

import billfish  # noqa: F401  registers packed loading with transformers
from billfish.models.generate import encode
from billfish.models.linear import QuantLinear
from billfish.offline.driver import quantize
from billfish.offline.request import QuantizeRequest
from billfish.schemes.w4a16 import W4A16

pytestmark = pytest.mark.vllm

PROMPTS, PROMPT_LENGTH, NEW = 12, 12, 16  # 192 positions to recite with 256 hidden dimensions
VOCAB = 5120
NOISE = 0.25  # of a log-probability; our own bf16 and fp32 differ by 0.1 at most
TIE = 0.25  # of SmolLM2's logits: two bf16 steps above 16, where the best ones lie


@dataclass(frozen=True)
class Case:
    scheme: W4A16
    intermediate: int = 512
    bias: bool = False
    head_bits: int | None = None


CASES = {
    "symmetric g64": Case(W4A16(4, 64)),
    "symmetric g128, down_proj in 16 bit": Case(W4A16(4, 128), intermediate=448),
    "asymmetric g64, biases": Case(W4A16(4, 64, symmetric=False), bias=True),
    # Of 4 bits, in groups of 128: vLLM's CPU kernels take no 8 bits.
    "symmetric g64, packed head": Case(W4A16(4, 64), head_bits=4),
    "asymmetric channel": Case(W4A16(4, -1, symmetric=False)),
}


@dataclass(frozen=True)
class Ours(Answer):
    margins: torch.Tensor  # (prompts, new) logit of the token less the second best


def sequences() -> torch.Tensor:  # (PROMPTS, PROMPT_LENGTH + NEW)
    return recited(PROMPTS, PROMPT_LENGTH, NEW, VOCAB)


def small_llama(case: Case) -> LlamaForCausalLM:
    """Random; magnitude and mean change every 64 columns, so that no scale or zero is like another.

    The vocabulary is that large for vLLM 0.32: its int4 kernel runs AMX tiles without asking Linux
    for them and dies of SIGILL. oneDNN asks, but gets no head that is below 1 MiB on its rank.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=case.intermediate,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        attention_bias=case.bias,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "proj" in name and parameter.ndim == 2:
            n, k = parameter.shape
            grouped = parameter.data.view(n, k // 64, 64)
            spread = torch.randn(2, n, k // 64, 1)
            grouped += 0.01 * spread[0]
            grouped *= 2 * (0.5 * spread[1]).exp()
        elif name.endswith("bias"):
            parameter.data.normal_(std=0.3)
    return model.to(torch.bfloat16)


def quantized(case: Case, folder: Path) -> Path:
    """The small Llama that recites, as `quantize` writes it. The head is fitted to the quantized
    model's own hidden states; a packed one is made of it by a second job."""
    model = small_llama(case)
    model.save_pretrained(folder / "dense")
    request = QuantizeRequest(
        folder / "dense",
        folder / "quantized",
        case.scheme,
        method="rtn",
        allow_skipped=True,
        check=False,
    )
    quantize(request)
    teach(request.output, sequences(), PROMPT_LENGTH)
    if case.head_bits is None:
        return request.output
    taught = AutoModelForCausalLM.from_pretrained(request.output, dtype=torch.bfloat16)
    model.lm_head.weight.data = taught.lm_head.weight.data
    model.save_pretrained(folder / "dense")
    packed = replace(request, output=folder / "packed", head_bits=case.head_bits)
    quantize(packed)
    return packed.output


def ours(directory: Path, prompts: list[list[int]]) -> Ours:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    assert any(isinstance(module, QuantLinear) for module in model.modules())
    tokens, logprobs, margins = [], [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits = torch.cat(result.logits).float()  # (NEW, vocabulary)
        chosen = result.sequences[0, len(prompt) :]
        best = logits.topk(2).values
        tokens.append(chosen.tolist())
        logprobs.append(logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0])
        margins.append(best[:, 0] - best[:, 1])
    return Ours(tokens, torch.stack(logprobs), torch.stack(margins))


def stock(directory: Path, prompts: list[list[int]], tensor_parallel: int) -> Answer:
    return vllm(directory, prompts, NEW, tensor_parallel, dtype="bfloat16", plugins=False)


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "-"))
def small(request, tmp_path_factory) -> tuple[Path, Ours]:
    """A quantized small Llama and our answer, which is what it was made to recite."""
    directory = quantized(CASES[request.param], tmp_path_factory.mktemp("small"))
    answer = ours(directory, sequences()[:, :PROMPT_LENGTH].tolist())
    assert answer.tokens == sequences()[:, PROMPT_LENGTH:].tolist()
    assert float(answer.margins.min()) > LOGIT / 2
    return directory, answer


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_same_tokens(small, tensor_parallel):
    directory, expected = small
    before = {file.name: file.read_bytes() for file in directory.iterdir()}
    answer = stock(directory, sequences()[:, :PROMPT_LENGTH].tolist(), tensor_parallel)
    difference = answer.differs_by(expected)
    print(f"tensor parallel {tensor_parallel}: largest log-probability difference {difference:.3f}")
    assert answer.tokens == expected.tokens
    assert difference < NOISE
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == before


QUESTIONS = [
    "What is the capital of France?",
    "List the days of the week.",
    "Repeat this sentence: The quick brown fox jumps over the lazy dog.",
]
BEGINNINGS = ["1, 2, 3, 4, 5, 6, 7, 8, 9,", "2, 4, 6, 8, 10, 12,", "The capital of France is"]


def test_smollm2(tmp_path):
    if "BILLFISH_SMOLLM2" not in os.environ:
        pytest.skip("BILLFISH_SMOLLM2 names no dense SmolLM2 checkpoint; make test-vllm makes one")
    dense = Path(os.environ["BILLFISH_SMOLLM2"])
    directory = tmp_path / "quantized"
    quantize(QuantizeRequest(dense, directory, W4A16(4, 64), method="rtn", check=False))
    tokenizer = AutoTokenizer.from_pretrained(dense)
    prompts = [tokenizer(text).input_ids for text in BEGINNINGS]
    prompts += [encode(tokenizer, text, chat=True) for text in QUESTIONS]
    expected = ours(directory, prompts)
    answer = stock(directory, prompts, tensor_parallel=1)
    compared, difference = 0, 0.0
    for i, margins in enumerate(expected.margins):
        ties = (margins <= TIE).nonzero()
        end = int(ties[0]) if len(ties) else NEW
        text = tokenizer.decode(expected.tokens[i])
        assert answer.tokens[i][:end] == expected.tokens[i][:end], text
        compared += end
        gaps = (answer.logprobs[i] - expected.logprobs[i]).abs()
        difference = max([difference, *gaps[:end].tolist()])
    print(f"{compared} tokens compared, log-probabilities differ by {difference:.3f} at most")
    assert compared >= 3 * NEW
    assert difference < NOISE


def nibbles_of(words: torch.Tensor) -> torch.Tensor:  # (..., 8)
    return (words[..., None] >> (4 * torch.arange(8, dtype=torch.int32))) & 15


def words_of(nibbles: torch.Tensor) -> torch.Tensor:
    shifted = nibbles.long() << (4 * torch.arange(8))
    return shifted.sum(-1).to(torch.int32)  # wraps: the top nibble holds the sign


FAULTS = {
    "scales of the next group": ("weight_scale", lambda scales: scales.roll(1, 1)),
    "scales of the next row": ("weight_scale", lambda scales: scales.roll(1, 0)),
    "zeros of the next row": (
        "weight_zero_point",
        lambda zeros: words_of(nibbles_of(zeros).roll(1, -1)),
    ),
    "zeros less one, as GPTQ stores them": (
        "weight_zero_point",
        lambda zeros: words_of((nibbles_of(zeros) - 1) & 15),
    ),
    "codes in AWQ's order": (
        "weight_packed",
        lambda codes: words_of(nibbles_of(codes)[..., [0, 2, 4, 6, 1, 3, 5, 7]]),
    ),
}


def test_faults_are_seen(small, tmp_path):
    """What the comparison is worth: one linear of 21 read wrongly is seen, whatever the mistake."""
    directory, expected = small
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    linear = "model.layers.1.self_attn.o_proj"
    original = load_file(directory / index[f"{linear}.weight_packed"])
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    for fault, (suffix, change) in FAULTS.items():
        name = f"{linear}.{suffix}"
        if name not in original or (original[name].shape[1] == 1 and "next group" in fault):
            continue  # symmetric: no zeros; a scale a row: no next group
        tensors = original | {name: change(original[name]).contiguous()}
        save_file(tensors, tmp_path / index[name], metadata={"format": "pt"})
        answer = ours(tmp_path, sequences()[:, :PROMPT_LENGTH].tolist())
        difference = answer.differs_by(expected)
        wrong = sum(a != b for a, b in zip(answer.tokens, expected.tokens, strict=True))
        print(f"{fault}: {wrong} of {PROMPTS} prompts, log-probabilities by {difference:.2f}")
        assert wrong or difference > 2 * NOISE, fault
