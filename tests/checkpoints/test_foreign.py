"""Dialects against the real compressed-tensors package and against decoders in plain loops."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import match_targets
from foreign_fixtures import marlin_tensors, random_canonical

from billfish.checkpoints.dialects import read_dialect
from billfish.errors import UserError
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.dialects.awq import Awq
from billfish.schemes.w4a16.dialects.compressed import CompressedTensors
from billfish.schemes.w4a16.dialects.gptq import Gptq
from billfish.schemes.w4a16.dialects.marlin import Marlin

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
MARLIN = GPTQ | {"group_size": 128, "checkpoint_format": "marlin"}


def same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name


# --- the real package ---------------------------------------------------------------------------


def package_scheme(scheme):
    return QuantizationScheme.model_validate(
        CompressedTensors.config_of_all(scheme, [])["config_groups"]["group_0"]
    )


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("n", "k", "group_size"), [(24, 64, 32), (33, 47, -1), (9, 96, 16), (7, 5, -1)]
)
def test_package_decodes_our_words(bits, symmetric, n, k, group_size):
    scheme = W4A16(bits, group_size, symmetric)
    tensors = random_canonical(n, k, scheme, torch.float32, seed=bits)
    package = PackedQuantizationCompressor
    decoded = package.decompress(dict(tensors), package_scheme(scheme))["weight"]
    assert torch.equal(decoded, scheme.dequantize(tensors))


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("n", "k", "group_size"), [(24, 64, 32), (33, 47, -1)])
def test_we_read_the_packages_words(bits, symmetric, n, k, group_size):
    """The package quantizes and packs; its tensors are canonical, and pack to the same words."""
    scheme = W4A16(bits, group_size, symmetric)
    source = random_canonical(n, k, scheme, torch.float32, seed=bits + 10)
    weight, scale = scheme.dequantize(source), source["weight_scale"]
    state = {"weight": weight, "weight_scale": scale}
    if not symmetric:
        state["weight_zero_point"] = (scheme.zeros(source).int() - scheme.grid.middle).to(
            torch.int8
        )
    stored = PackedQuantizationCompressor.compress(state, package_scheme(scheme))
    dialect = CompressedTensors.read(CompressedTensors.config_of_all(scheme, []))
    read = dialect.to_canonical(scheme, stored, n, k)
    same(read, source)
    assert dialect.size(scheme, stored) == (n, k)
    assert torch.equal(scheme.dequantize(read), weight)


@pytest.mark.parametrize("scheme", [W4A16(), W4A16(8, -1), W4A16(3, 32, symmetric=False)])
def test_package_reads_our_config(scheme):
    ours = CompressedTensors.config_of_all(scheme, ["lm_head", "re:.*gate$"])
    theirs = QuantizationConfig.model_validate(ours)
    weights = theirs.config_groups["group_0"].weights
    assert (weights.num_bits, weights.symmetric) == (scheme.bits, scheme.symmetric)
    assert weights.strategy == ("channel" if scheme.group_size == -1 else "group")
    dumped = theirs.model_dump()
    assert CompressedTensors.read(dumped).scheme("a.b") == scheme
    for key in dumped.keys() & ours.keys():  # what the package would serialise is what we wrote
        if key != "config_groups":
            assert dumped[key] == ours[key], key
    assert QuantizationArgs.model_validate(dumped["config_groups"]["group_0"]["weights"]) == weights


def test_targets_have_the_packages_precedence():
    group = CompressedTensors.config_of_all(W4A16(), [])["config_groups"]["group_0"]
    targets = ["Linear", "re:.*mlp.*", "re:.*down.*", "model.layers.0.mlp.down_proj"]
    groups = {}
    for i, target in enumerate(targets):
        weights = group["weights"] | {"num_bits": i + 2}
        groups[f"group_{i}"] = group | {"targets": [target], "weights": weights}
    config = CompressedTensors.config_of_all(W4A16(), ["re:.*k_proj", "lm_head"]) | {
        "config_groups": groups
    }
    dialect = CompressedTensors.read(config)
    linear = torch.nn.Linear(1, 1)
    for name in (
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.self_attn.q_proj",
    ):
        first = match_targets(name, linear, targets)[0]
        assert dialect.scheme(name).bits == targets.index(first) + 2, name
    assert dialect.scheme("model.layers.1.self_attn.k_proj") is None
    assert dialect.scheme("lm_head") is None
    assert (
        CompressedTensors.read(CompressedTensors.config_of_all(W4A16(), ["Linear"])).scheme("x")
        is None
    )


# --- plain loops, from each format's definition ---------------------------------------------------


def bits_of(words):
    """A list of int32 as one little-endian bit string."""
    return "".join(format(word & 0xFFFFFFFF, "032b")[::-1] for word in words)


def code_at(words, index, bits):
    return int(bits_of(words)[index * bits : (index + 1) * bits][::-1], 2)


def decode_gptq(stored, bits, n, k, offset):
    """w[n, k] = (q - (z + offset)) * s: q goes down a column of qweight, z along a row."""
    columns = stored["qweight"].T.tolist()
    rows = stored["qzeros"].tolist()
    weight = torch.empty(n, k)
    for i in range(n):
        for j in range(k):
            g = stored["g_idx"][j].item()
            code = code_at(columns[i], j, bits)
            zero = code_at(rows[g], i, bits) + offset
            weight[i, j] = (code - zero) * stored["scales"][g, i].float()
    return weight


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("symmetric", "has_g_idx", "stored_as"),
    [
        (True, False, "gptq"),
        (True, True, "gptq"),
        (False, False, "gptq_v2"),
        (False, True, "gptq_v2"),
    ],
)
def test_gptq_means_what_its_definition_says(bits, symmetric, has_g_idx, stored_as):
    n, k = 32, 64
    scheme = W4A16(bits, 32, symmetric, has_g_idx)
    tensors = random_canonical(n, k, scheme, seed=bits)
    config = Gptq.config({"x": scheme}, [])
    assert config["checkpoint_format"] == config["format"] == stored_as
    dialect = read_dialect(config)
    assert dialect.scheme("x") == scheme
    stored = dialect.from_canonical(scheme, tensors)
    offset = 1 if stored_as == "gptq" else 0
    assert torch.equal(decode_gptq(stored, bits, n, k, offset), scheme.dequantize(tensors))
    assert dialect.size(scheme, stored) == (n, k)
    assert dialect.resolve_scheme(scheme, stored) == scheme
    same(dialect.to_canonical(scheme, stored, n, k), tensors)


def test_gptq_v1_asymmetric_is_read():
    """We do not write it, but it exists: zeros 1 to 15 are stored as 0 to 14."""
    scheme = W4A16(4, 32, symmetric=False)
    tensors = random_canonical(32, 64, scheme)
    zeros = scheme.zeros(tensors).clamp(min=1)
    tensors = scheme.pack(scheme.codes(tensors), tensors["weight_scale"], zeros)
    dialect = read_dialect(GPTQ | {"sym": False})
    stored = dialect.from_canonical(scheme, tensors)
    assert torch.equal(decode_gptq(stored, 4, 32, 64, 1), scheme.dequantize(tensors))
    same(dialect.to_canonical(scheme, stored, 32, 64), tensors)


def test_symmetric_gptq_zeros_are_the_words_everybody_writes():
    scheme = W4A16(4, 32)
    stored = read_dialect(GPTQ).from_canonical(scheme, random_canonical(32, 64, scheme))
    assert set(stored["qzeros"].flatten().tolist()) == {0x77777777}
    assert stored["g_idx"].tolist() == [0] * 32 + [1] * 32


def test_trivial_g_idx_is_dropped_and_a_real_one_kept():
    dialect = read_dialect(GPTQ | {"desc_act": True})
    assert dialect.scheme("x").has_g_idx
    scheme = W4A16(4, 32)
    stored = dialect.from_canonical(scheme, random_canonical(32, 64, scheme))
    resolved = dialect.resolve_scheme(dialect.scheme("x"), stored)
    assert not resolved.has_g_idx
    assert "weight_g_idx" not in dialect.to_canonical(resolved, stored, 32, 64)
    with pytest.raises(UserError, match="resolve_scheme"):
        dialect.to_canonical(dialect.scheme("x"), stored, 32, 64)
    stored["g_idx"] = stored["g_idx"].flip(0)
    assert dialect.resolve_scheme(scheme, stored).has_g_idx


def decode_awq(stored, n, k, group_size):
    """Nibble i of word c holds column 8 c + [0, 2, 4, 6, 1, 3, 5, 7][i]; the zero as it is."""
    where = {column: nibble for nibble, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7])}
    weight = torch.empty(n, k)
    for i in range(n):
        word, shift = i // 8, 4 * where[i % 8]
        for j in range(k):
            g = j // group_size
            code = stored["qweight"][j, word].item() >> shift & 15
            zero = stored["qzeros"][g, word].item() >> shift & 15
            weight[i, j] = (code - zero) * stored["scales"][g, i].float()
    return weight


def test_awq_means_what_its_definition_says():
    scheme = W4A16(4, 32, symmetric=False)
    tensors = random_canonical(24, 64, scheme)
    dialect = read_dialect(AWQ)
    stored = dialect.from_canonical(scheme, tensors)
    assert torch.equal(decode_awq(stored, 24, 64, 32), scheme.dequantize(tensors))
    assert dialect.size(scheme, stored) == (24, 64)
    assert dialect.resolve_scheme(scheme, stored) == dialect.scheme("x") == scheme
    same(dialect.to_canonical(scheme, stored, 24, 64), tensors)


def test_a_symmetric_layer_as_awq_has_zeros_of_8():
    scheme = W4A16(4, 32)
    tensors = random_canonical(24, 64, scheme)
    stored = read_dialect(AWQ).from_canonical(scheme, tensors)
    assert torch.equal(decode_awq(stored, 24, 64, 32), scheme.dequantize(tensors))


def decode_marlin(stored, n, k, groups):
    """Every lane of a warp reads its words and multiplies what the instruction expects of it.

    A row of B is 16 of k; in each 64 of n, lane l has four words, one per 16 columns. Nibbles 0, 4,
    1, 5 are k = 2 (l % 4) + 0, 1, 8, 9 of column l // 4; nibbles 2, 6, 3, 7 are 8 columns further.
    """
    weight = torch.empty(n, k)
    scale = torch.empty(groups, n)
    for g in range(groups):
        for column in range(n):
            if groups > 1:
                place = column // 64 * 64 + column % 8 * 8 + column % 64 // 8
            else:
                place = column // 32 * 32 + column % 8 // 2 * 8 + column % 32 // 8 * 2 + column % 2
            scale[g, column] = stored["s"][g, place].float()
    for row in range(k // 16):
        for tile in range(n // 64):
            for lane in range(32):
                for block in range(4):
                    word = stored["B"][row, tile * 128 + lane * 4 + block].item()
                    for half, nibbles in enumerate(((0, 4, 1, 5), (2, 6, 3, 7))):
                        for nibble, step in zip(nibbles, (0, 1, 8, 9), strict=True):
                            i = tile * 64 + block * 16 + half * 8 + lane // 4
                            j = row * 16 + 2 * (lane % 4) + step
                            code = word >> 4 * nibble & 15
                            weight[i, j] = (code - 8) * scale[j * groups // k, i]
    return weight


@pytest.mark.parametrize(("k", "group_size"), [(256, 128), (128, 128), (128, -1)])
def test_marlin_means_what_its_kernel_does(k, group_size):
    n, scheme = 128, W4A16(4, group_size)
    tensors = random_canonical(n, k, scheme)
    stored = marlin_tensors(scheme, tensors)
    dialect = read_dialect(MARLIN | {"group_size": group_size})
    groups = tensors["weight_scale"].shape[1]
    assert torch.equal(decode_marlin(stored, n, k, groups), scheme.dequantize(tensors))
    assert dialect.size(scheme, stored) == (n, k)
    assert dialect.resolve_scheme(scheme, stored) == dialect.scheme("x") == scheme
    same(dialect.to_canonical(scheme, stored, n, k), tensors)


# --- which modules -------------------------------------------------------------------------------


def test_gptq_modules():
    config = GPTQ | {
        "dynamic": {
            r"-:.*\.0\.mlp": {},
            r"+:.*down_proj": {"bits": 8, "sym": False},
            r".*up_proj": {"group_size": -1},
        },
        "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj", "mlp.up_proj"]],
    }
    dialect = read_dialect(config)
    assert dialect.scheme("model.layers.1.self_attn.q_proj") == W4A16(4, 32)
    assert dialect.scheme("model.layers.1.self_attn.k_proj") is None
    assert dialect.scheme("model.layers.1.mlp.down_proj") == W4A16(8, 32, symmetric=False)
    assert dialect.scheme("model.layers.1.mlp.up_proj") == W4A16(4, -1)
    assert dialect.scheme("model.layers.0.mlp.up_proj") is None
    assert dialect.scheme("lm_head") is None
    assert read_dialect(GPTQ | {"lm_head": True}).scheme("lm_head") == W4A16(4, 32)
    assert read_dialect(GPTQ | {"desc_act": True, "group_size": -1}).scheme("x") == W4A16(4, -1)


def test_awq_and_marlin_modules():
    awq = read_dialect(AWQ | {"modules_to_not_convert": ["layers.1.", "gate"]})
    assert awq.scheme("model.layers.0.mlp.down_proj") == W4A16(4, 32, symmetric=False)
    assert awq.scheme("model.layers.1.mlp.down_proj") is None
    assert awq.scheme("lm_head") is None
    marlin = read_dialect(MARLIN)
    assert marlin.scheme("model.layers.1.mlp.down_proj") == W4A16(4, 128)
    assert marlin.scheme("lm_head") is None


def test_configs_in_all_their_spellings():
    assert isinstance(read_dialect({"bits": 4, "group_size": 128, "desc_act": False}), Gptq)
    assert isinstance(read_dialect({"w_bit": 4, "q_group_size": 128, "version": "GEMM"}), Awq)
    assert isinstance(read_dialect(GPTQ | {"is_marlin_format": True, "group_size": -1}), Marlin)
    v2 = read_dialect({"method": "gptq", "format": "gptq_v2", "bits": 4, "group_size": 32})
    assert isinstance(v2, Gptq) and v2.stored_as == "gptq_v2"
    nested = {
        "quant_method": "compressed-tensors",
        "quantization_config": CompressedTensors.config_of_all(W4A16(), []),
    }
    assert read_dialect(nested).scheme("x") == W4A16()
    weights = {"num_bits": 4, "group_size": 32, "actorder": "static"}
    group = {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}
    config = {"format": "mixed-precision", "config_groups": {"a": group}}
    assert CompressedTensors.read(config).scheme("x") == W4A16(4, 32)
    weights["actorder"] = "group"
    assert CompressedTensors.read(config).scheme("x") == W4A16(4, 32, has_g_idx=True)


@pytest.mark.parametrize("writer", [CompressedTensors, Gptq])
def test_a_written_config_is_read_as_it_was_meant(writer):
    schemes = {
        "model.layers.0.a": W4A16(4, 32),
        "model.layers.1.a": W4A16(8, 64, symmetric=False),
        "model.layers.10.a": W4A16(4, 32),
        "lm_head": W4A16(4, -1),
    }
    ignore = ["model.layers.1.b"]
    dialect = read_dialect(writer.config(schemes, ignore))
    assert {module: dialect.scheme(module) for module in schemes} == schemes
    assert dialect.scheme("model.layers.1.b") is None


def test_awq_config():
    schemes = {"a": W4A16(4, 32), "b": W4A16(4, 32, symmetric=False)}
    dialect = read_dialect(Awq.config(schemes, ["c", "lm_head"]))
    assert dialect.scheme("a") == dialect.scheme("b") == W4A16(4, 32, symmetric=False)
    assert dialect.scheme("c") is None
    assert Awq.config(schemes, ["lm_head"])["modules_to_not_convert"] is None
