"""A w2416 checkpoint on disk: read, shown, run; and each of its tensors missing, of another shape
or with impossible values, which is refused by name."""

import json
import shutil

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
from billfish.schemes.w2416 import W2416

SCHEME = W2416(3.3, 0.004)
LAYER = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("w2416")
    source = write_checkpoint(folder / "source", num_hidden_layers=2)
    quantize(request(source, folder / "out", "sample", method="rtn", scheme=SCHEME))
    return folder / "out"


def test_it_is_read_shown_and_run(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    assert config["schemes"] == {"0": {"name": "w2416", "budget": 3.3, "outliers": 0.004}}
    found = inspect(checkpoint)
    assert found["dialect"] == "billfish" and found["packed_linears"] == 14
    assert found["bits_per_weight"]["packed"] <= 3.32  # its outputs are fewer than 128
    assert verify(checkpoint)["ok"]
    model, _ = load(checkpoint)
    layer = model.get_submodule(LAYER)
    weight = SCHEME.dequantize(layer.tensors())
    x = torch.eye(weight.shape[1])
    torch.testing.assert_close(layer(x).T, weight)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"budget": 2.45}, "too few for"),
        ({"budget": 3.8}, "weight_packed"),
        ({"budget": "3.3"}, "do not fit"),
        ({"budget": 3}, "do not fit"),
        ({"budget": float("nan")}, "must be finite"),
        ({"outliers": 0.03}, "weight_packed"),
        ({"outliers": [0.1]}, "do not fit"),
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
    "input_bits": lambda t: t.fill_(4),
    "scale_base": lambda t: t.fill_(-1),
    "weight_scale_4": lambda t: t.fill_(torch.nan),
    "outlier_place": lambda t: t.fill_(-1),
    "outlier_value": lambda t: t.fill_(torch.inf),
}
NAMES = tuple(SCHEME.tensors(64, 128, torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in NAMES for how in ("missing", "short")),
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
        tensors[key] = tensors[key].flatten()[:-1].contiguous()
    else:
        HOSTILE[name](tensors[key])
    save_file(tensors, file, metadata={"format": "pt"})
    told = verify(broken)
    with pytest.raises(UserError) as caught:
        load(broken)
    # k is that of input_bits: if it is short, the others do not fit.
    named = "weight_packed_4" if (name, how) == ("input_bits", "short") else name
    assert not told["ok"] and named in json.dumps(told) and LAYER in str(caught.value)
