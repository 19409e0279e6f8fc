"""Every refusal of a dialect to read a config or to store a layer."""

import pytest
from foreign_fixtures import marlin_tensors, random_canonical

from billfish.checkpoints.dialects import read_dialect
from billfish.errors import UserError
from billfish.schemes.dialect import refuse_unknown
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.dialects.awq import Awq
from billfish.schemes.w4a16.dialects.compressed import CompressedTensors
from billfish.schemes.w4a16.dialects.gptq import Gptq
from billfish.schemes.w4a16.dialects.marlin import Marlin

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
MARLIN = GPTQ | {"group_size": 128, "checkpoint_format": "marlin"}


def ct(group=None, weights=None, **top):
    config = CompressedTensors.config_of_all(W4A16(), [])
    base = config["config_groups"]["group_0"]
    base["weights"].update(weights or {})
    base.update(group or {})
    return config | top


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' cannot be read"),
        ({}, "None cannot be read"),
        (ct(group={"format": "float-quantized"}), "'float-quantized'"),
        (ct(group={"format": None}, format="int-quantized"), "'int-quantized'"),
        (ct(group={"format": "nvfp4-pack-quantized"}), "nvfp4"),
        (ct(weights={"type": "float"}), "'float' weights"),
        (ct(weights={"dynamic": True}), "dynamic weight scales"),
        (ct(weights={"strategy": "block"}), "'block'"),
        (ct(weights={"strategy": None, "group_size": None}), "'tensor'"),
        (ct(weights={"group_size": 0}), "must be positive"),
        (ct(weights={"num_bits": 1}), "2 to 8 bits"),
        (ct(weights={"num_bits": "4"}), "not an integer"),
        (ct(weights={"num_bits": None}), "num_bits is missing"),
        (ct(weights={"symmetric": "yes"}), "not true or false"),
        (ct(group={"weights": None}), "no weights entry"),
        (ct(group={"input_activations": {"num_bits": 8}}), "input_activations"),
        (ct(group={"output_activations": {"num_bits": 8}}), "output_activations"),
        (ct(group={"targets": [3]}), "targets holds 3"),
        (ct(group={"targets": ["re:("]}), "no regular expression"),
        (ct(ignore=["re:["]), "no regular expression"),
        (ct(config_groups={}), "without config_groups"),
        (ct(config_groups={"W4A16": ["Linear"]}), "preset"),
        (ct(config_groups=["Linear"]), "config_groups is ['Linear'], expected an object"),
        (ct(sparsity_config="2:4"), "sparsity_config is '2:4'"),
        (ct(quantization_status="frozen"), "'frozen'"),
        (ct(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (ct(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (ct(moe_sparsity_config={"method": "prune"}), "moe_sparsity_config"),
        (ct(transform_config={"config_groups": {"u": {}}}), "transform_config"),
        (GPTQ | {"checkpoint_format": "marlin_24"}, "'marlin_24'"),
        (GPTQ | {"pack_dtype": "int64"}, "pack_dtype 'int64'"),
        (GPTQ | {"bits": 5}, "5 bits"),
        (GPTQ | {"group_size": None}, "group_size is missing"),
        (GPTQ | {"dynamic": {"+:x": 4}}, "dynamic rule"),
        (GPTQ | {"dynamic": {"-:(": {}}}, "no regular expression"),
        (AWQ | {"version": "gemv"}, "'gemv'"),
        (AWQ | {"version": None, "format": "gemv_fast"}, "'gemv_fast'"),
        (AWQ | {"bits": 3}, "3 bits"),
        (MARLIN | {"group_size": 64}, "group size 64"),
        (MARLIN | {"sym": False}, "symmetric"),
        (MARLIN | {"desc_act": True}, "desc_act"),
    ],
)
def test_configs_that_cannot_be_read(config, message):
    with pytest.raises(UserError) as error:
        read_dialect(config)
    assert message in str(error.value)


SYM, ASYM, ORDERED = W4A16(4, 32), W4A16(4, 32, symmetric=False), W4A16(4, 32, has_g_idx=True)


@pytest.mark.parametrize(
    ("config", "scheme", "n", "k", "message"),
    [
        (AWQ, W4A16(8, 32), 32, 64, "4 bits, not 8"),
        (AWQ, SYM, 20, 64, "n = 20"),
        (AWQ, ORDERED, 32, 64, "reordered"),
        (GPTQ, W4A16(5, 32), 32, 64, "not 5"),
        (GPTQ, SYM, 20, 64, "whole 32-bit words"),
        (GPTQ, W4A16(4, -1), 32, 20, "whole 32-bit words"),
        (GPTQ, ASYM, 32, 64, "gptq_v2"),
        (MARLIN, W4A16(4, 128), 64, 128, "read only"),
    ],
)
def test_what_a_dialect_cannot_say(config, scheme, n, k, message):
    tensors = random_canonical(n, k, scheme)
    with pytest.raises(UserError, match=message):
        read_dialect(config).from_canonical(scheme, tensors)


def test_configs_that_cannot_be_written():
    assert "lm_head" in Awq.refuses("lm_head", SYM, 32, 64)
    assert CompressedTensors.refuses("lm_head", ORDERED, 3, 64) is None
    with pytest.raises(UserError, match="one group size"):
        Awq.config({"a": SYM, "b": W4A16(4, 64)}, [])
    with pytest.raises(UserError, match="read only"):
        Marlin.config({"a": W4A16(4, 128)}, [])
    with pytest.raises(UserError, match="no quantized linear"):
        Gptq.config({}, [])


def broken(config, scheme, change, n=32, k=64):
    dialect = read_dialect(config)
    tensors = random_canonical(n, k, scheme)
    if dialect.name == "marlin":
        stored = marlin_tensors(scheme, tensors)
    else:
        stored = dialect.from_canonical(scheme, tensors)
    change(stored)
    return dialect, stored


def drop(name):
    return lambda stored: stored.pop(name)


def put(name, make):
    return lambda stored: stored.update({name: make(stored[name])})


V2 = GPTQ | {"checkpoint_format": "gptq_v2"}


@pytest.mark.parametrize(
    ("config", "scheme", "change", "message"),
    [
        (ct(), SYM, drop("weight_scale"), "weight_scale is missing"),
        (ct(), SYM, put("weight_packed", lambda t: t[:-1]), r"weight_packed has shape \(31, 8\)"),
        (ct(), SYM, put("weight_packed", lambda t: t.long()), "has dtype torch.int64"),
        (ct(), SYM, put("weight_shape", lambda t: t.flip(0)), r"weight_shape says \(64, 32\)"),
        (ct(), ORDERED, put("weight_g_idx", lambda t: t + 1), "g_idx goes from 1 to 2"),
        (ct(), ORDERED, put("weight_g_idx", lambda t: t * 0), "0 to 64 columns"),
        (GPTQ, SYM, drop("qzeros"), "qzeros is missing"),
        (GPTQ, SYM, put("qzeros", lambda t: t ^ 1), "every zero must be 8, and qzeros holds 7, 8"),
        (V2, SYM, put("qzeros", lambda t: t * 0 + 0x77777777), "qzeros holds 7"),
        (GPTQ, SYM, put("qzeros", lambda t: t * 0 - 0x77777778), "gptq_v2"),
        (V2, ORDERED, put("g_idx", lambda t: t - 1), "g_idx goes from -1"),
        (AWQ, ASYM, put("scales", lambda t: t[:1]), r"scales has shape \(1, 32\)"),
        (MARLIN, W4A16(4, 128), put("s", lambda t: t.T), "s has shape"),
    ],
)
def test_tensors_that_contradict_their_config(config, scheme, change, message):
    n, k = (64, 256) if scheme.group_size == 128 else (32, 64)
    dialect, stored = broken(config, scheme, change, n, k)
    with pytest.raises(UserError, match=message):
        dialect.to_canonical(scheme, stored, n, k)


def test_other_contradictions():
    v1 = GPTQ | {"sym": False}
    dialect, stored = broken(GPTQ, SYM, put("qzeros", lambda t: t | 15))
    with pytest.raises(UserError, match="overflow"):
        read_dialect(v1).to_canonical(ASYM, stored, 32, 64)
    dialect, stored = broken(GPTQ, SYM, drop("g_idx"))
    same_scheme = dialect.resolve_scheme(SYM, stored)
    assert same_scheme == SYM and "g_idx" not in stored
    dialect.to_canonical(SYM, stored, 32, 64)
    with pytest.raises(UserError, match="g_idx is missing although desc_act"):
        dialect.resolve_scheme(ORDERED, stored)
    with pytest.raises(UserError, match="weight_shape is missing"):
        read_dialect(ct()).size(SYM, {})
    with pytest.raises(UserError, match="whole 16 x 64 tiles"):
        read_dialect(MARLIN).to_canonical(W4A16(4, 128), {}, 32, 128)
    with pytest.raises(UserError, match="weight_g_idx, x is unknown"):
        refuse_unknown(read_dialect(ct()), SYM, ["weight_packed", "bias", "x", "weight_g_idx"])
