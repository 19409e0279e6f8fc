"""load and the engine run packed layers with the op that the caller names."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import write_checkpoint
from transformers import PreTrainedModel

from billfish import LLM, SamplingParams, load
from billfish.errors import UserError
from billfish.models.linear import QuantLinear
from billfish.offline.driver import quantize
from billfish.offline.request import QuantizeRequest
from billfish.schemes.w4a16 import W4A16, kleidiai


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("load")
    source, scheme = write_checkpoint(folder / "source"), W4A16(4, 32, False)
    quantize(QuantizeRequest(source, folder / "out", scheme, "rtn", stored_dtype=torch.bfloat16))
    return folder / "out"


def ops(model):
    layers = [layer for layer in model.modules() if isinstance(layer, QuantLinear)]
    assert layers
    return {layer.op and layer.op.name for layer in layers}


@pytest.mark.parametrize("op", ["cpu", "kleidiai", "reference"])
def test_an_op_by_name(packed, op):
    if op == "kleidiai" and not kleidiai.works():
        with pytest.raises(UserError, match=r"op 'kleidiai' cannot run .*dotprod"):
            load(packed, op=op)
        pytest.skip("no KleidiAI here: it is ARM's with dotprod")
    model, tokenizer = load(packed, "float32", op=op)
    usual = load(packed, "float32")[0]
    assert ops(model) == {op}
    with torch.inference_mode():
        ids = torch.arange(3, 27).view(2, 12)
        want, got = usual(ids).logits, model(ids).logits
    assert (got - want).norm() <= (0.05 if op == "kleidiai" else 1e-3) * want.norm()
    assert ops(usual) == {"cpu"}
    with LLM.of(model, tokenizer) as engine:
        (text,) = engine.generate("a", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(text.outputs[0].token_ids) == 4 and ops(model) == {op}


def test_ops_that_are_none(packed):
    with pytest.raises(UserError, match=r"known are auto, .*cpu"):
        load(packed, op="marlin9")
    with pytest.raises(UserError, match="op 'invariant' cannot run"):
        load(packed, op="invariant")
    with pytest.raises(UserError, match=r"(?s)no batch invariant op.*invariant: its weights"):
        load(packed, batch_invariant=True)
    with pytest.raises(UserError, match="'cpu' is not batch invariant"):
        load(packed, op="cpu", batch_invariant=True)


def test_threads_that_load_at_once_leave_tied_weights_tied(tmp_path):
    """transformers patches PreTrainedModel.tie_weights while it builds a model."""
    path = write_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    usual = PreTrainedModel.tie_weights

    def tied(_):
        model = load(path)[0]
        return model.lm_head.weight is model.model.embed_tokens.weight

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tied, range(16))) == [True] * 16
    assert PreTrainedModel.tie_weights is usual
