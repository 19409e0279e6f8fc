"""A w4a16_24 checkpoint on disk: made, read, shown, run; a source that is 2:4 already; each of its
tensors missing, of another shape or with impossible values, which is refused by name."""

import json
import shutil
from dataclasses import asdict

import pytest
import torch
from jobs import request
from safetensors.torch import load_file, save_file
from tiny import write_checkpoint

from billfish.checkpoints.inspect import inspect
from billfish.checkpoints.verify import verify
from billfish.errors import UserError
from billfish.models.load import load
from billfish.offline.driver import quantize
from billfish.schemes.w4a16_24 import W4A16Sparse
from billfish.schemes.w4a16_24.scheme import spread

SCHEME = W4A16Sparse(32)
LAYER = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("source") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, source):
    out = tmp_path_factory.mktemp("w4a16_24") / "out"
    quantize(request(source, out, "sample", scheme=SCHEME))
    return out


def test_it_is_read_shown_and_run(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    assert config["schemes"] == {"0": {"name": "w4a16_24", **asdict(SCHEME)}}
    found = inspect(checkpoint)
    assert found["dialect"] == "billfish" and found["packed_linears"] == 14
    assert verify(checkpoint)["ok"]
    model, _ = load(checkpoint)
    for name, layer in model.named_modules():
        if name.endswith("proj"):
            fours = SCHEME.dequantize(layer.tensors()).view(layer.out_features, -1, 4)
            assert int((fours != 0).sum(-1).max()) == 2
    layer = model.get_submodule(LAYER)
    x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
    exact = SCHEME.reference(layer.tensors(), x).float()
    torch.testing.assert_close(layer(x), exact, rtol=0, atol=1e-3)  # x in 16 bits


def test_a_sparse_source_keeps_its_pattern(tmp_path, source):
    sparse = shutil.copytree(source, tmp_path / "sparse")
    (file,) = sparse.glob("*.safetensors")
    tensors, kept = load_file(file), {}
    for name, tensor in tensors.items():
        if "_proj" in name:
            fours = tensor.view(len(tensor), -1, 4)
            places = fours.abs().float().topk(2).indices.sort().values
            kept[name] = places
            flat = places.flatten(1)
            tensors[name] = spread(fours.gather(2, places).flatten(1), flat, tensor.shape[1])
    save_file(tensors, file, metadata={"format": "pt"})
    report = quantize(request(sparse, tmp_path / "out", "sample", scheme=SCHEME))
    assert all("its pattern is kept" in layer["note"] for layer in report["layers"])
    model, _ = load(tmp_path / "out")
    for name, places in kept.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        assert torch.equal(SCHEME.kept(layer.tensors())[1], places.flatten(1).byte()), name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group_size": 64}, "weight_scale"),
        ({"group_size": 48}, "group size 48"),
        ({"group_size": "32"}, "group size 32"),
        ({"group_size": 32.0}, "do not fit"),
        ({"mask": None}, "known are sparsegpt"),
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


NAMES = tuple(SCHEME.tensors(64, 128, torch.bfloat16))
HOSTILE = {
    "weight_meta": lambda t: t.zero_(),
    "weight_scale": lambda t: t.fill_(torch.nan),
    "weight_shape": lambda t: t.fill_(2**40),
}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(
            (name, how)
            for name in SCHEME.tensors(8, 32, torch.half)
            for how in ("missing", "short")
        ),
        *((name, "hostile") for name in HOSTILE),
    ],
)
def test_damage_is_refused_by_name(tmp_path, checkpoint, name, how):
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
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
    assert not told["ok"]
    assert any(problem["tensor"] == key for problem in told["problems"])
    with pytest.raises(UserError, match=LAYER.replace(".", r"\.")):
        load(broken)
