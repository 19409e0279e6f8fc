"""The plug-in in vLLM: every scheme gives the tokens of our own engine, on one rank and on two.

Both compute in fp32 here; what differs is the order of sums and, for w4ax on two ranks, the scale
of a token, which each rank has for its own inputs.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from vllm_harness import Answer, Failed, engine, recited, teach, vllm

from billfish.checkpoints.convert import convert
from billfish.models.generate import encode
from billfish.offline.driver import quantize
from billfish.offline.request import QuantizeRequest
from billfish.schemes.registry import from_options

pytestmark = pytest.mark.vllm

PROMPTS, PROMPT, NEW = 3, 8, 64
VOCABULARY = 1024
# Sizes that w2416 can split in two: at least 1024 inputs, of o_proj and of down_proj, too.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Phi3")
SCHEMES = {
    "w4a16": ("w4a16", {"group_size": 64, "symmetric": False}),
    "w2416": ("w2416", {}),
    "w4ax": ("w4ax", {"group_size": 64}),
    "fmpq": ("w4ax", {"group_size": 64, "activations": "fmpq"}),
    "w4a16_24": ("w4a16_24", {"group_size": 64}),
}
NOISE = 0.01  # of a log-probability: sums in another order
# Where x is rounded to 8 bits, what differs in the last bit may round to the next step; and each of
# two ranks has a step of its own.
NOISE_ROUNDED = {1: 0.3, 2: 1.0}


def quantized(dense: Path, output: Path, name: str) -> Path:
    scheme, options = SCHEMES[name]
    made = from_options(scheme, options)
    quantize(QuantizeRequest(dense, output, made, method="rtn", check=False))
    return output


def dense(family: str, folder: Path, **changes) -> Path:
    torch.manual_seed(0)
    sizes = SIZES | changes
    if family == "Qwen3":
        sizes["head_dim"] = 128
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**sizes)
    )
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases that do something
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def sequences() -> torch.Tensor:
    return recited(PROMPTS, PROMPT, NEW, VOCABULARY)


def prompts() -> list[list[int]]:
    return sequences()[:, :PROMPT].tolist()


def taken_over(name: str) -> dict[str, str]:
    """w4a16 is stored as compressed-tensors, which vLLM runs itself unless told otherwise."""
    return {"quantization": "billfish"} if name == "w4a16" else {}


def noise(name: str, ranks: int) -> float:
    return NOISE_ROUNDED[ranks] if SCHEMES[name][0] == "w4ax" else NOISE


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(family, scheme) -> a quantized model that recites, and our engine's answer."""
    folder, made = tmp_path_factory.mktemp("models"), {}

    def model(family: str, name: str) -> tuple[Path, Answer]:
        if (family, name) not in made:
            if not (source := folder / family).exists():
                dense(family, source)
            directory = quantized(source, folder / f"{family}-{name}", name)
            teach(directory, sequences(), PROMPT)
            answer = engine(directory, prompts(), NEW)
            assert answer.tokens == sequences()[:, PROMPT:].tolist()
            made[family, name] = directory, answer
        return made[family, name]

    return model


# Everything on two ranks; on one, the easier case, each scheme and each family at least once:
# test_compiled has it, too.
CELLS = [(family, name, 2) for family in FAMILIES for name in SCHEMES]
CELLS += [(family, name, 1) for family, name in zip((*FAMILIES, "Llama"), SCHEMES, strict=True)]


@pytest.mark.parametrize(("family", "name", "tensor_parallel"), sorted(CELLS))
def test_same_tokens(family, name, tensor_parallel, models):
    directory, expected = models(family, name)
    answer = vllm(directory, prompts(), NEW, tensor_parallel, **taken_over(name))
    difference = answer.differs_by(expected)
    print(f"{family} {name}, {tensor_parallel} ranks: log-probabilities by {difference:.4f}")
    assert answer.tokens == expected.tokens
    assert difference < noise(name, tensor_parallel)


@pytest.mark.parametrize("name", ["w4a16", "w4ax", "w4a16_24"])
def test_compiled(name, models):
    """torch.compile with Inductor, as vLLM does unless told otherwise: whole graphs, once for any
    number of tokens."""
    directory, expected = models("Llama", name)
    answer = vllm(directory, prompts(), NEW, enforce_eager=False, **taken_over(name))
    assert answer.tokens == expected.tokens
    assert answer.differs_by(expected) < noise(name, 1)


def test_ranks_that_vllm_starts(models):
    """Compiled, in fresh processes that get the config through a pipe: what vLLM does unless told
    otherwise."""
    directory, expected = models("Qwen2", "w2416")
    settings = {"distributed_executor_backend": "mp", "enforce_eager": False}
    answer = vllm(directory, prompts(), NEW, 2, **settings)
    assert answer.tokens == expected.tokens
    assert answer.differs_by(expected) < noise("w2416", 2)


def test_bfloat16(models):
    directory, expected = models("Qwen2", "w2416")
    answer = vllm(directory, prompts(), NEW, dtype="bfloat16")
    assert answer.tokens == expected.tokens


@pytest.mark.parametrize(("to", "tensor_parallel"), [("gptq", 2), ("awq", 1), ("awq", 2)])
def test_other_formats_are_taken_over(to, tensor_parallel, models, tmp_path):
    """`convert` keeps codes, scales and zeros, so the answer is the same."""
    directory, expected = models("Llama", "w4a16")
    convert(directory, tmp_path / to, to)
    answer = vllm(tmp_path / to, prompts(), NEW, tensor_parallel, quantization="billfish")
    assert answer.tokens == expected.tokens
    assert answer.differs_by(expected) < NOISE


def test_reordered_columns_run_on_one_rank_and_are_refused_on_two(models, tmp_path):
    """desc_act. The config does not say it: what counts is g_idx, which is small."""
    directory, _ = models("Llama", "w4a16")
    gptq = tmp_path / "gptq"
    convert(directory, gptq, "gptq")
    groups = torch.arange(SIZES["hidden_size"], dtype=torch.int32) // 64
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(2))
    changed(gptq, gptq, "model.layers.1.self_attn.o_proj.g_idx", groups[order])
    teach(gptq, sequences(), PROMPT)
    expected = engine(gptq, prompts(), NEW)
    assert expected.tokens == sequences()[:, PROMPT:].tolist()
    answer = vllm(gptq, prompts(), NEW, quantization="billfish")
    assert answer.tokens == expected.tokens
    assert answer.differs_by(expected) < NOISE
    with pytest.raises(Failed, match=r"layers.1.self_attn.o_proj: .* \(desc_act\)") as failed:
        vllm(gptq, prompts(), NEW, 2, quantization="billfish")
    assert "Loading weights took" not in str(failed.value)


def test_a_layer_that_cannot_be_split_is_refused(tmp_path):
    small = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    directory = quantized(dense("Llama", tmp_path / "dense", **small), tmp_path / "w2416", "w2416")
    with pytest.raises(Failed) as failed:
        vllm(directory, [[1, 2]], 1, 2)
    text = str(failed.value)
    assert "o_proj: this 256 x 256 linear cannot be split over 2 ranks" in text
    assert "Loading weights took" not in text


def changed(directory: Path, copy: Path, name: str, tensor: torch.Tensor | None) -> None:
    """A copy of a checkpoint with another tensor in the place of one; None: without it."""
    if copy != directory:
        shutil.copytree(directory, copy, dirs_exist_ok=True)
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    file = copy / index["weight_map"][name]
    tensors = load_file(file) | {name: tensor}
    if tensor is None:
        del tensors[name], index["weight_map"][name]
    save_file(tensors, file, metadata={"format": "pt"})
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))


def test_an_order_of_inputs_that_crosses_ranks_is_refused(models, tmp_path):
    """As GPTQ's would: rounding to nearest, as here, leaves inputs in place."""
    directory, _ = models("Phi3", "fmpq")
    order = torch.arange(SIZES["hidden_size"], dtype=torch.int32).flip(0)
    changed(directory, tmp_path, "model.layers.1.self_attn.o_proj.input_order", order)
    with pytest.raises(Failed, match=r"layers.1.self_attn.o_proj: a layer cannot be cut") as failed:
        vllm(tmp_path, prompts(), NEW, 2)
    assert "Loading weights took" not in str(failed.value)


def test_a_missing_tensor_is_named(models, tmp_path):
    directory, _ = models("Llama", "w4a16_24")
    changed(directory, tmp_path, "model.layers.1.mlp.up_proj.weight_meta", None)
    with pytest.raises(Failed, match=r"model.layers.1.mlp.up_proj: weight_meta is missing"):
        vllm(tmp_path, [[1, 2]], 1)


QUESTIONS = ["What is the capital of France?", "List the days of the week."]
BEGINNINGS = ["1, 2, 3, 4, 5, 6, 7, 8, 9,", "The capital of France is"]


@pytest.fixture(scope="module", params=["w4a16", "w2416", "w4a16_24"])
def smollm2(request, tmp_path_factory) -> tuple[str, Path]:
    if "BILLFISH_SMOLLM2" not in os.environ:
        pytest.skip("BILLFISH_SMOLLM2 names no dense SmolLM2 checkpoint; make test-vllm makes one")
    source = Path(os.environ["BILLFISH_SMOLLM2"])
    return request.param, quantized(source, tmp_path_factory.mktemp("smollm2") / "q", request.param)


def test_smollm2(smollm2):
    """It speaks freely. Not with w4ax: without calibration its 8-bit steps turn last bits into 0.1
    of a log-probability, and our engine and transformers with QuantLinear part as soon."""
    name, directory = smollm2
    tokenizer = AutoTokenizer.from_pretrained(directory)
    asked = [tokenizer(text).input_ids for text in BEGINNINGS]
    asked += [encode(tokenizer, text, chat=True) for text in QUESTIONS]
    expected = engine(directory, asked, NEW)
    answer = vllm(directory, asked, NEW, **taken_over(name))
    same = [
        next((i for i in range(NEW) if a[i] != b[i]), NEW)
        for a, b in zip(answer.tokens, expected.tokens, strict=True)
    ]
    print(f"{name}: {same} of {NEW} tokens equal")
    assert same == [NEW] * len(asked)


def test_smollm2_has_nine_heads(smollm2):
    name, directory = smollm2
    with pytest.raises(Failed, match=r"attention heads \(9\) must be divisible by tensor parallel"):
        vllm(directory, [[1, 2]], 1, 2, **taken_over(name))
