"""StreamedModel against the whole model, for many architectures; folds; refused models."""

import pytest
import torch
import transformers
from tiny import ARCHITECTURES, write_checkpoint

from billfish.checkpoints.read import Checkpoint
from billfish.errors import UserError
from billfish.models.blocks import StreamedModel
from billfish.models.fold import find_reordering, fold_source
from billfish.models.passes import probe_structure
from billfish.models.skeleton import find_blocks

CPU = torch.device("cpu")


def stream(path):
    return StreamedModel(Checkpoint(path), torch.float32, CPU)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_streamed_blocks_compute_what_the_model_computes(tmp_path, architecture):
    """Batches of two lengths; the last hidden state must be that of an ordinary forward pass."""
    path = write_checkpoint(tmp_path / "model", architecture)
    whole = getattr(transformers, architecture).from_pretrained(path).eval()
    batches = [torch.randint(1, 100, shape) for shape in ((2, 40), (1, 25))]
    model = stream(path)
    hidden, arguments = model.first_inputs(batches)
    assert all(p.device.type == "meta" for p in model.blocks.parameters() if p.ndim == 2)
    for index in range(len(model.blocks)):
        model.fill(model.block_prefix(index))
        hidden = [model.run(index, state, arguments) for state in hidden]
        model.drop(model.block_prefix(index))
    # The blocks' list ends before the final norm: compare with what a hook sees in the whole model.
    blocks = whole.get_submodule(model.prefix)
    for ids, state in zip(batches, hidden, strict=True):
        seen = []
        handle = blocks[-1].register_forward_hook(lambda m, a, output, s=seen: s.append(output))
        with torch.inference_mode():
            whole(ids)
        handle.remove()
        expected = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        (
            "LlamaForCausalLM",
            [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]],
        ),
        ("OPTForCausalLM", [["q_proj", "k_proj", "v_proj"], ["out_proj"], ["fc1"], ["fc2"]]),
        (
            "GPTNeoXForCausalLM",
            [["query_key_value"], ["dense"], ["dense_h_to_4h"], ["dense_4h_to_h"]],
        ),
        ("BertModel", [["query", "key", "value"], ["dense"], ["dense"], ["dense"]]),
    ],
)
def test_linears_that_share_an_input_are_found(tmp_path, architecture, expected):
    model = stream(write_checkpoint(tmp_path / "model", architecture))
    hidden, arguments = model.first_inputs([torch.randint(1, 100, (1, 20))])
    model.fill(model.block_prefix(0))
    groups = probe_structure(model, 0, hidden[0], arguments).groups
    leaves = [[path.rpartition(".")[2] for path in group] for group in groups]
    assert sorted(map(sorted, leaves)) == sorted(map(sorted, expected))


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        # SiLU and GELU bend: only the straight path can take a scale. ReLU lets it pass.
        (
            "LlamaForCausalLM",
            {
                "q_proj": "input_layernorm",
                "o_proj": "v_proj",
                "gate_proj": "post_attention_layernorm",
                "down_proj": "up_proj",
            },
        ),
        (
            "OPTForCausalLM",
            {
                "q_proj": "self_attn_layer_norm",
                "out_proj": "v_proj",
                "fc1": "final_layer_norm",
                "fc2": "fc1",
            },
        ),
        ("Gemma2ForCausalLM", {"q_proj": None, "down_proj": "up_proj"}),  # its norm is (1 + weight)
        ("GPTNeoXForCausalLM", {"dense_4h_to_h": None}),
    ],
)
def test_scales_fold_only_where_the_block_stays_the_same(tmp_path, architecture, expected):
    model = stream(write_checkpoint(tmp_path / "model", architecture))
    hidden, arguments = model.first_inputs([torch.randint(1, 100, (1, 20))])
    model.fill(model.block_prefix(0))
    for group in probe_structure(model, 0, hidden[0], arguments).groups:
        leaf = group[0].rpartition(".")[2]
        if leaf in expected:
            source = fold_source(model, 0, group, hidden[0], arguments)
            found = source and source.path.rpartition(".")[2]
            assert found == expected[leaf], (leaf, found)


def test_channels_change_places_only_where_the_block_stays_the_same(tmp_path):
    """Gate and up together, v within its heads (two queries share one), a norm's never."""
    model = stream(write_checkpoint(tmp_path / "model"))
    hidden, arguments = model.first_inputs([torch.randint(1, 100, (1, 20))])
    model.fill(model.block_prefix(0))
    groups = probe_structure(model, 0, hidden[0], arguments).groups
    found = {}
    for group in groups:
        source = fold_source(model, 0, group, hidden[0], arguments)
        beside = next((each for each in groups if source.path in each), [])
        found[group[0].rpartition(".")[2]] = find_reordering(
            model, 0, source, group, beside, hidden[0], arguments
        )
    assert found["q_proj"] is None and found["gate_proj"] is None
    assert found["o_proj"].paths == ("self_attn.v_proj",) and found["o_proj"].span == 16
    assert found["down_proj"].paths == ("mlp.up_proj", "mlp.gate_proj")
    assert found["down_proj"].span == 128
    expected = model.run(0, hidden[0], arguments)
    found["down_proj"].apply(model.blocks[0], ["mlp.down_proj"], torch.randperm(128))
    assert torch.allclose(model.run(0, hidden[0], arguments), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("RwkvForCausalLM", "weights of three dimensions"),
        ("JetMoeForCausalLM", "it is a mixture of experts"),
        ("XLNetLMHeadModel", "weights of three dimensions"),
        ("GPT2LMHeadModel", "hold no nn.Linear but Conv1D"),
    ],
)
def test_each_family_is_refused_for_its_own_reason(architecture, reason):
    model_class = getattr(transformers, architecture)
    config = model_class.config_class()
    config.num_hidden_layers = 1
    with torch.device("meta"):
        model = model_class(config)
    with pytest.raises(UserError, match=f"{architecture}: .*{reason}"):
        find_blocks(model)


def test_what_cannot_be_streamed_is_refused(tmp_path):
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match=r"no nn\.Linear"):
        stream(tmp_path / "gpt2")
    config = transformers.T5Config(d_model=32, num_layers=1, d_ff=32, num_heads=2, vocab_size=64)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(UserError, match="encoder-decoder"):
        stream(tmp_path / "t5")
