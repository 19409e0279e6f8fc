"""A w4ax checkpoint on disk: read, shown, run; channel factors folded; each of its tensors missing,
of another shape or with impossible values, which is refused by name."""

import json
import shutil
from dataclasses import asdict

import pytest
import torch
from jobs import request
from safetensors.torch import load_file, save_file
from thorough import some
from tiny import write_checkpoint

from billfish.checkpoints.inspect import inspect
from billfish.checkpoints.verify import verify
from billfish.errors import UserError
from billfish.models.load import load
from billfish.offline.driver import quantize
from billfish.schemes.registry import quantizer
from billfish.schemes.w4ax import W4AX

SCHEME = W4AX(32)
MIXED = W4AX(32, False, "fmpq", 0.5, True)
LAYER = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("source") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, source):
    out = tmp_path_factory.mktemp("w4ax") / "out"
    quantize(request(source, out, "sample", method="rtn", scheme=SCHEME))
    return out


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, source):
    out = tmp_path_factory.mktemp("fmpq") / "out"
    quantize(request(source, out, "sample", scheme=MIXED))
    return out


def test_it_is_read_shown_and_run(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    assert config["schemes"] == {"0": {"name": "w4ax", **asdict(SCHEME)}}
    found = inspect(checkpoint)
    assert found["dialect"] == "billfish" and found["packed_linears"] == 14
    assert verify(checkpoint)["ok"]
    model, _ = load(checkpoint)
    layer = model.get_submodule(LAYER)
    x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layer(x), SCHEME.reference(layer.tensors(), x).float())


def test_a_config_without_younger_parameters_is_read(tmp_path, checkpoint):
    path = shutil.copytree(checkpoint, tmp_path / "older") / "config.json"
    config = json.loads(path.read_text())
    for name in ("symmetric", "a4_share", "rotation"):
        del config["quantization_config"]["schemes"]["0"][name]
    path.write_text(json.dumps(config))
    assert load(path.parent)[0].get_submodule(LAYER).scheme == SCHEME


def test_an_fmpq_file_is_read_shown_and_run(mixed):
    found = inspect(mixed)
    assert found["packed_linears"] == 14 and verify(mixed)["ok"]
    assert found["bytes"]["zeros"] > 0
    model, _ = load(mixed)
    for path in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        layer = model.model.layers[1].get_submodule(path)
        x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
        tensors = layer.tensors()
        assert torch.equal(layer(x), MIXED.reference(tensors, x).float())
        bits, blocks = tensors["input_bits"], layer.in_features // 32
        assert (bits == 4).sum() == blocks // 2 and (bits == 8).sum() == blocks // 2


def test_linears_of_one_input_share_its_order_and_downs_is_folded(mixed):
    for layer in load(mixed)[0].model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        orders = {
            name: part.tensors()["input_order"].tolist()
            for block in (attention, mlp)
            for name, part in block.named_children()
            if name.endswith("proj")
        }
        assert orders["q_proj"] == orders["k_proj"] == orders["v_proj"] != sorted(orders["q_proj"])
        assert orders["gate_proj"] == orders["up_proj"] != sorted(orders["up_proj"])
        assert orders["o_proj"] != sorted(orders["o_proj"])
        assert orders["down_proj"] == list(range(128))


@pytest.mark.parametrize("compute", some(["float32", "bfloat16"], 1))
def test_orders_leave_the_model_as_it_is(tmp_path, source, compute):
    """With 8 bits everywhere it is as near to the original as without orders."""
    ids = torch.randint(2, 100, (2, 48), generator=torch.Generator().manual_seed(0))
    exact = load(source)[0](ids).logits.float()

    def error(scheme):
        out = tmp_path / scheme.activations
        dtype = getattr(torch, compute)
        quantize(request(source, out, "sample", scheme=scheme, dtype=dtype, nsamples=64))
        return float((load(out)[0](ids).logits.float() - exact).norm() / exact.norm())

    assert error(W4AX(32, True, "fmpq", 0.0, False)) < 1.1 * error(SCHEME) < 0.6


def test_channel_factors_are_folded_into_norms_and_up(tmp_path, source, monkeypatch):
    """Each column that is multiplied is divided where it comes from; o's inputs, which heads share,
    stay as they are."""
    module, given = quantizer(SCHEME), []
    solve = module.quantize
    monkeypatch.setattr(module, "quantize", lambda *args: given.append(args[1]) or solve(*args))
    changes = {"method": "gptq", "scheme": SCHEME, "dtype": torch.float32}  # norms are rounded once
    quantize(request(source, tmp_path / "out", "sample", **changes))
    original, made = (load(path)[0].model.layers for path in (source, tmp_path / "out"))
    for i, layer in enumerate(original):
        attention, mlp = layer.self_attn, layer.mlp
        qkv, o, gate_up, down = given[4 * i : 4 * i + 4]
        heads = torch.cat(
            [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        )
        both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        assert torch.equal(o, attention.o_proj.weight)
        for name, now, before in (
            ("input_layernorm", qkv, heads),
            ("post_attention_layernorm", gate_up[:128], both[:128]),
        ):
            factor = (now / before).median(0).values
            torch.testing.assert_close(now, before * factor, rtol=1e-5, atol=1e-7)
            old, new = (getattr(each, name).weight.float() for each in (layer, made[i]))
            torch.testing.assert_close(new * factor, old, rtol=2**-8, atol=0)  # stored in bf16
            assert factor.max() / factor.min() > 1.1
        columns = (down / mlp.down_proj.weight).median(0).values
        up = both[128:] * factor / columns[:, None]
        torch.testing.assert_close(gate_up[128:], up, rtol=1e-4, atol=1e-7)
        assert columns.max() / columns.min() > 1.1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group_size": 64}, "group_scale"),
        ({"group_size": 48}, "power of 2"),
        ({"group_size": "32"}, "group size 32"),
        ({"group_size": True}, "group size True"),
        ({"activations": "a4"}, "known are a8, fmpq"),
        ({"activations": "fmpq"}, "input_order is missing"),
        ({"symmetric": False}, "group_zero is missing"),
        ({"symmetric": "no"}, "do not fit"),
        ({"a4_share": 0.5}, "belong to activations fmpq"),
        ({"a4_share": "half"}, "a4_share 'half'"),
        ({"rotation": 1}, "belong to activations fmpq"),
        ({"activations": 8}, "known are a8"),
        ({"activations": None}, "known are a8"),
        ({"bits": 4}, "do not fit"),
    ],
)
def test_a_config_of_other_parameters_is_refused(tmp_path, checkpoint, change, says):
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    path = broken / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["schemes"]["0"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=says):
        load(broken)
    assert not verify(broken)["ok"]


HOSTILE = {
    "group_scale": lambda t: t.fill_(-1),
    "weight_scale": lambda t: t.fill_(torch.nan),
    "group_zero": lambda t: t.fill_(0),
    "input_order": lambda t: t.fill_(5),
    "input_bits": lambda t: t.fill_(6),
}
NAMES = tuple(MIXED.tensors(64, 128, torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in NAMES for how in ("missing", "short")),
        *((name, "hostile") for name in HOSTILE),
    ],
)
def test_damage_is_refused_by_name(tmp_path, mixed, name, how):
    broken = shutil.copytree(mixed, tmp_path / "broken")
    file = next(path for path in broken.glob("*.safetensors") if LAYER in str(load_file(path)))
    tensors, key = load_file(file), f"{LAYER}.{name}"
    if how == "missing":
        del tensors[key]
    elif how == "short":
        tensors[key] = tensors[key][..., :-1].contiguous()
    else:
        HOSTILE[name](tensors[key])
    save_file(tensors, file, metadata={"format": "pt"})
    told = verify(broken)
    with pytest.raises(UserError) as caught:
        load(broken)
    # k is that of weight_packed: if it is short, it is no k of the scheme's.
    assert not told["ok"] and name in json.dumps(told) and LAYER in str(caught.value)
