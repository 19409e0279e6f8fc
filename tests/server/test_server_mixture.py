"""A mixture of experts with a packed head, from quantization to answers over HTTP."""

import pytest
import torch
from jobs import request as asked
from served import MODEL, served
from tiny import write_checkpoint

from billfish.checkpoints.verify import verify
from billfish.models.experts import Experts
from billfish.models.linear import QuantLinear
from billfish.models.load import load
from billfish.offline.driver import quantize

TEXT = "all experts of a mixture see some of these tokens, 0123456789. " * 40
PROMPTS = ["experts see", "0123", "a mixture of tokens"]


@pytest.fixture(
    scope="module", params=["MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"]
)
def mixture(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    source = write_checkpoint(folder / "source", request.param)
    (folder / "text.txt").write_text(TEXT)
    quantize(asked(source, folder / "out", str(folder / "text.txt"), method="rtn", head_bits=8))
    return folder / "out"


def test_the_head_is_packed_beside_experts(mixture):
    assert verify(mixture)["ok"], verify(mixture)["problems"]
    model, _ = load(mixture, "float32")
    experts = [each for each in model.modules() if isinstance(each, Experts)]
    inside = [
        linear for each in experts for linear in each.modules() if not list(linear.children())
    ]
    assert len(experts) == 2 and sum(isinstance(linear, QuantLinear) for linear in inside) == 24
    head = model.lm_head
    assert isinstance(head, QuantLinear) and head.scheme.bits == 8
    ids = torch.randint(1, 100, (1, 20))
    with torch.inference_mode():
        hidden, logits = model.model(ids)[0], model(ids).logits
    exact = hidden.double() @ head.weight.double().T
    assert (logits - exact).abs().max() < 1e-3 * exact.abs().max()


def test_answers_are_those_of_transformers(mixture):
    """Three requests in one batch, greedy, whose tokens go to different experts."""
    model, tokenizer = load(mixture, "float32")
    wanted = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
        wanted.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    with served(mixture, dtype="float32", max_num_seqs=4) as server, server.http() as http:
        body = {"model": MODEL, "prompt": PROMPTS, "max_tokens": 12, "temperature": 0}
        answer = http.post("/v1/completions", json={**body, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        texts = [choice["text"] for choice in answer.json()["choices"]]
        assert answer.json()["usage"]["completion_tokens"] == 36
    # the tokenizer of characters puts spaces between them, but not before the first
    assert [text.split() for text in texts] == [text.split() for text in wanted]
