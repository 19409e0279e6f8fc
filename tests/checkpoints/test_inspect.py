"""inspect reports true sizes and contents, for every dialect."""

import json
import shutil
from pathlib import Path

import pytest
from foreign_fixtures import write_case
from tiny import character_tokenizer
from tiny_checkpoint import all_tensors, edit_json, tiny_llama

from billfish.checkpoints.inspect import inspect
from billfish.checkpoints.verify import verify
from billfish.errors import UserError
from billfish.offline.driver import quantize
from billfish.offline.request import QuantizeRequest
from billfish.schemes.w4a16 import W4A16

FOREIGN = (
    "compressed-tensors asym",
    "compressed-tensors 3 bit",
    "gptq",
    "gptq v2",
    "gptq desc_act",
    "awq",
    "marlin",
    "marlin channel",
)
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def dense(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("dense") / "model"
    model.save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def made(dense, tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "model"
    quantize(QuantizeRequest(dense, path, W4A16(4, 32, symmetric=False), "rtn"))
    return path


@pytest.fixture
def ours(made, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(made, tmp_path / "ours"))


def test_dense(dense, model):
    found = inspect(dense)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert (found["dialect"], found["schemes"], found["packed_linears"]) == ("dense", [], 0)
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["parameters"] == count and found["dense_tensors"] == len(all_tensors(dense))
    assert found["bits_per_weight"] == {"packed": None, "model": 32.0}
    assert found["bytes"]["dense"] == found["bytes"]["total"] == 4 * count
    assert found["unsupported"] is None and not found["problems"] and not found["made_by_billfish"]
    json.dumps(found)


def test_ours_against_the_files(made, model):
    found, tensors = inspect(made), all_tensors(made)

    def total(*ends):
        return sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith(ends))

    weights = sum(p.numel() for name, p in model.named_parameters() if "_proj" in name)
    parameters = sum(p.numel() for p in model.parameters())
    packed = ("_packed", "_scale", "_zero_point", "_shape")
    assert found["bytes"] == {
        "packed": total("weight_packed"),
        "scales": total("weight_scale"),
        "zeros": total("weight_zero_point"),
        "other": total("weight_shape"),
        "dense": total("") - total(*packed),
        "total": total(""),
    }
    assert found["bits_per_weight"]["packed"] == total(*packed) * 8 / weights
    assert found["bits_per_weight"]["model"] == total("") * 8 / parameters
    assert (found["parameters"], found["packed_parameters"]) == (parameters, weights)
    assert (found["packed_linears"], found["dialect"]) == (14, "compressed-tensors")
    assert found["made_by_billfish"]
    scheme = {"name": "w4a16", "bits": 4, "group_size": 32, "symmetric": False, "has_g_idx": False}
    assert found["schemes"] == [{**scheme, "count": 14}]
    assert [file["tensors"] for file in found["files"]] == [3, 30, 30]
    assert sum(file["bytes"] for file in found["files"]) == sum(
        path.stat().st_size for path in made.glob("*.safetensors")
    )
    rows = {row["kind"]: row for row in found["kinds"]}
    assert sum(row["bytes"] for row in rows.values()) == found["bytes"]["total"]
    k_proj = [name for name in tensors if ".k_proj." in name]
    assert rows["k_proj"] == {
        "kind": "k_proj",
        "shape": [32, 64],
        "count": 2,
        "scheme": scheme,
        "dtype": None,
        "bytes": sum(tensors[name].nbytes for name in k_proj),
        "bits_per_weight": sum(tensors[name].nbytes for name in k_proj) * 8 / (2 * 32 * 64),
    }
    assert rows["lm_head"]["scheme"] is None and rows["lm_head"]["bits_per_weight"] == 16
    json.dumps(found)


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_dialects(case, tmp_path):
    model, schemes, _, stored = write_case(case, tmp_path)
    found = inspect(tmp_path)
    names = {"gptq v2": "gptq_v2", "gptq desc_act": "gptq"}
    assert found["dialect"] == names.get(case, case.split()[0])
    packed = {n: t for n, t in stored.items() if n.rpartition(".")[0] in schemes}
    weights = sum(model.get_submodule(module).weight.numel() for module in schemes)
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["packed_linears"] == found["schemes"][0]["count"] == len(schemes)
    scheme = next(iter(schemes.values()))
    fields = ("bits", "group_size", "symmetric", "has_g_idx")
    assert [found["schemes"][0][f] for f in fields] == [getattr(scheme, f) for f in fields]
    nbytes = sum(tensor.nbytes for tensor in packed.values())
    assert found["bits_per_weight"]["packed"] == nbytes * 8 / weights
    result = verify(tmp_path)
    assert result["ok"], result["problems"]
    assert result["checked"]["packed_linears"] == len(schemes)
    assert result["checked"]["parameters"] == len(list(model.parameters()))


def test_unsupported_format_is_named_and_listed(dense, tmp_path):
    path = Path(shutil.copytree(dense, tmp_path / "fp8"))
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_json(path / "config.json", lambda c: c.update(quantization_config=config))
    found = inspect(path)
    assert found["dialect"] == "fp8" and "'fp8' cannot be read" in found["unsupported"]
    assert found["parameters"] is None and found["bits_per_weight"]["model"] is None
    listed = {tensor["name"]: tensor["bytes"] for tensor in found["tensors"]}
    assert listed == {name: tensor.nbytes for name, tensor in all_tensors(path).items()}
    problems = verify(path)["problems"]
    assert [problem["file"] for problem in problems] == ["config.json"]


def test_inspect_goes_on_where_one_layer_does_not_fit(ours):
    def ignore(config):
        config["quantization_config"]["ignore"].append(Q_PROJ)

    edit_json(ours / "config.json", ignore)
    found = inspect(ours)
    assert found["packed_linears"] == 13 and found["parameters"] is None
    assert len(found["problems"]) == 1 and Q_PROJ in found["problems"][0]


def test_damaged_header_is_an_error_for_users(ours):
    shard = ours / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b'"data_offsets"', b'"data_offsetz"', 1))
    with pytest.raises(UserError, match=r"model-00002-of-00003.safetensors: .* is damaged"):
        inspect(ours)
