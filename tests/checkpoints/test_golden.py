"""Golden bytes: sha256 of what format version 1 writes for fixed numbers, and the rules of
docs/FORMAT.md for slices and versions. `python tests/checkpoints/test_golden.py` rewrites
golden.json."""

import hashlib
import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from foreign_fixtures import marlin_tensors

from billfish.checkpoints.dialects import read_dialect
from billfish.checkpoints.own import Own
from billfish.checkpoints.write import MANIFEST, finish, shard_name, write_shard
from billfish.formats import layout
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.dialects.awq import Awq
from billfish.schemes.w4a16.dialects.compressed import CompressedTensors
from billfish.schemes.w4a16.dialects.gptq import Gptq
from billfish.schemes.w4a16_24 import W4A16Sparse
from billfish.schemes.w4a16_24.scheme import PAIRS
from billfish.schemes.w4ax import W4AX
from billfish.schemes.w2416 import W2416

GOLDEN = Path(__file__).with_name("golden.json")
FORMAT = Path(__file__).parents[2] / "docs" / "FORMAT.md"
CHANGED = (
    "these bytes are no longer those of format version 1: files written before would be read as "
    "something else, or the other way round. Undo the change; or, if it is meant, raise the "
    "version in docs/FORMAT.md and in the manifest, and write golden.json anew."
)


def numbers(scheme, n, k, dtype=torch.float16):
    """Codes, scales and zeros by formula: every level occurs, neighbours differ."""
    groups = 1 if scheme.group_size == -1 else k // scheme.group_size
    i, j, g = torch.arange(n)[:, None], torch.arange(k)[None], torch.arange(groups)[None]
    codes = (3 * i * i + 7 * j + i * j) % scheme.grid.levels
    scales = ((1 + (5 * i + 3 * g) % 11) / 64).to(dtype)
    zeros = (i + 2 * g) % scheme.grid.levels
    return codes, scales, zeros


def canonical(scheme, n, k, dtype=torch.float16):
    tensors = scheme.pack(*numbers(scheme, n, k, dtype))
    if scheme.has_g_idx:
        columns = torch.arange(k) * 5 % k  # k is no multiple of 5
        tensors["weight_g_idx"] = (columns // scheme.group_size).to(torch.int32)
    return tensors


def as_gptq(scheme, n, k):
    dialect = read_dialect(Gptq.config({"x": scheme}, []))
    return dialect.from_canonical(scheme, canonical(scheme, n, k))


def as_awq(scheme, n, k):
    dialect = read_dialect(Awq.config({"x": scheme}, []))
    return dialect.from_canonical(scheme, canonical(scheme, n, k))


def mixed(scheme, n, k):
    """w2416: every tensor by formula, and the weight that they mean."""
    share, tensors = scheme.shares(k), {}
    for salt, (name, spec) in enumerate(scheme.tensors(n, k, torch.float16).items(), 3):
        index = torch.arange(spec.nbytes // spec.dtype.itemsize).view(spec.shape)
        if spec.dtype.is_floating_point:
            tensors[name] = ((1 + index * salt % 13) / 64).to(spec.dtype)
        else:
            tensors[name] = (index * 2654435761 * salt % 2**62).to(spec.dtype)
    inside = torch.arange(k // 16) % (share.two + share.four)
    tensors["input_bits"] = torch.where(inside < share.four, 4, 2).to(torch.uint8)
    tensors["scale_base"] = tensors["scale_base"] & 0x3FFF | 0x1000
    places = tensors["outlier_place"].int() % (16 * share.part)
    tensors["outlier_place"] = ((places ^ 0x8000) - 0x8000).to(torch.int16)
    scheme.check(tensors)
    return {**tensors, "weight": scheme.dequantize(tensors)}


def whole(scheme, n, k):
    """w4ax: codes and whole scales by formula, the weight that they mean, and a product's sums."""
    i, j = torch.arange(n)[:, None], torch.arange(k)[None]
    codes, q = (3 * i * i + 7 * j + i * j) % 16, (5 * i + 3 * j[:, : k // scheme.group_size]) % 16
    base = ((1 + 5 * i % 11) / 64).to(torch.float16)
    zero, order = 7 + q % 3, (j[0] * 7 + 3) % k  # 7 and k have no common factor
    bits = 4 + 4 * (torch.arange(k // scheme.block) % 3 == 1)
    q = q if scheme.symmetric else q % 14
    tensors = scheme.pack(codes, q + 1, base, zero, order, bits)
    scheme.check(tensors)
    x = ((11 * j + 5 * i[:3]) % 97 - 48) / 8
    sums, scale = scheme.whole_sums(tensors, x)
    meant = {"weight": scheme.dequantize(tensors), "sums": sums, "scale": scale}
    return {**tensors, **meant, "y": scheme.reference(tensors, x)}


def sparse(scheme, n, k):
    """w4a16_24: codes and places by formula, and the weight that they mean."""
    i, j = torch.arange(n)[:, None], torch.arange(2 * -(-k // 4))[None]
    four, pair = j // 2, torch.tensor(PAIRS)[(5 * i + 3 * (j // 2) + i * (j // 2)) % 6]
    places = pair.gather(2, (j % 2).expand(n, -1)[..., None])[..., 0]
    codes = (3 * i * i + 7 * j + i * j) % 16
    codes[4 * four + places >= k] = 8
    groups = k // scheme.group_of(k)
    scales = ((1 + (5 * i + 3 * torch.arange(groups)) % 11) / 64).to(torch.float16)
    tensors = scheme.pack(codes, places, scales, n, k)
    scheme.check(tensors)
    return {**tensors, "weight": scheme.dequantize(tensors)}


@cache
def packed():
    """{case: {tensor name: tensor}} of every layout of every dialect."""
    cases = {}
    for bits in range(2, 9):
        for symmetric in (True, False):
            kind = f"{bits} bit {'symmetric' if symmetric else 'asymmetric'}"
            cases[f"canonical {kind}"] = canonical(W4A16(bits, 32, symmetric), 24, 96)
            cases[f"canonical {kind} channel ragged"] = canonical(W4A16(bits, -1, symmetric), 7, 13)
            if bits in (2, 3, 4, 8):
                cases[f"gptq {kind}"] = as_gptq(W4A16(bits, 32, symmetric), 32, 96)
                cases[f"gptq {kind} desc_act"] = as_gptq(W4A16(bits, 32, symmetric, True), 32, 96)
    cases["w2416"] = mixed(W2416(2.91), 32, 1024)
    cases["w4ax"] = whole(W4AX(32), 24, 320)
    cases["w4ax asymmetric"] = whole(W4AX(32, False), 24, 320)
    cases["w4ax fmpq"] = whole(W4AX(64, True, "fmpq", 0.5, True), 24, 320)
    cases["w4ax fmpq plain"] = whole(W4AX(32, False, "fmpq", 0.5, False), 24, 320)
    cases["w4a16_24"] = sparse(W4A16Sparse(32), 24, 96)
    cases["w4a16_24 channel ragged"] = sparse(W4A16Sparse(-1), 7, 45)
    cases["canonical bfloat16"] = canonical(W4A16(), 8, 256, torch.bfloat16)
    cases["canonical g_idx"] = canonical(W4A16(4, 32, has_g_idx=True), 8, 96)
    for symmetric in (True, False):
        kind = "symmetric" if symmetric else "asymmetric"
        cases[f"awq {kind}"] = as_awq(W4A16(4, 32, symmetric), 24, 96)
    for size in (128, -1):
        scheme = W4A16(4, size)
        cases[f"marlin {size}"] = marlin_tensors(scheme, canonical(scheme, 128, 256))
    return cases


def described(tensor):
    """dtype, shape and sha256 of the bytes as a safetensors file holds them."""
    plain = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    content = plain.view(torch.uint8).numpy().tobytes()
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


def write_directory(path):
    """Two shards, the index and the manifest."""
    scheme = W4A16(4, 32, symmetric=False)
    shards = [shard_name(number, 2) for number in (1, 2)]
    write_shard(path / shards[0], {"model.norm.weight": torch.arange(8).to(torch.bfloat16)})
    tensors = {f"x.{name}": tensor for name, tensor in canonical(scheme, 24, 96).items()}
    write_shard(path / shards[1], tensors | {"x.bias": torch.ones(24, dtype=torch.float16)})
    finish(path, shards)


def files():
    """{file name: sha256} of write_directory."""
    with TemporaryDirectory() as name:
        write_directory(Path(name))
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(Path(name).iterdir())
        }


def computed():
    tensors = {
        case: {name: described(tensor) for name, tensor in sorted(tensors.items())}
        for case, tensors in packed().items()
    }
    return {"version": 1, "tensors": tensors, "files": files()}


def golden():
    return json.loads(GOLDEN.read_text(encoding="utf8"))


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", packed())
def test_tensors(case):
    found = {name: described(tensor) for name, tensor in packed()[case].items()}
    assert found == golden()["tensors"][case], f"{case}: {CHANGED}"


def test_nothing_golden_is_lost():
    assert golden()["tensors"].keys() == packed().keys(), CHANGED


def test_files():
    assert files() == golden()["files"], CHANGED


def test_a_shard_does_not_depend_on_the_order_of_its_tensors(tmp_path):
    tensors = {f"x.{name}": tensor for name, tensor in canonical(W4A16(4, 32), 24, 96).items()}
    write_shard(tmp_path / "a", tensors)
    write_shard(tmp_path / "b", dict(reversed(tensors.items())))
    strided = {name: torch.stack([t, t], -1)[..., 0] for name, t in tensors.items()}
    write_shard(tmp_path / "c", strided)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "c").read_bytes()


def test_one_version_everywhere(tmp_path):
    write_directory(tmp_path)
    version = golden()["version"]
    assert json.loads((tmp_path / MANIFEST).read_text())["version"] == version
    said = re.search(r"^Format version: (\d+)$", FORMAT.read_text(encoding="utf8"), re.MULTILINE)
    assert said is not None and int(said[1]) == version


def test_the_configs_of_the_page_are_real_ones():
    examples = re.findall(r"```json\n(.*?)```", FORMAT.read_text(encoding="utf8"), re.DOTALL)
    mixed = {name: W4A16(4, 64) for name in "abc"} | {"model.layers.0.mlp.down_proj": W4A16(8, 64)}
    written = [
        CompressedTensors.config_of_all(W4A16(4, 32, symmetric=False), ["lm_head"]),
        Own.config({"a": W4AX(), "b": W4AX(), "lm_head": W4A16(8, 128)}, []),
        Own.config(mixed, ["lm_head"]),
    ]
    assert [json.loads(example) for example in examples] == written
    heads = [None, W4A16(8, 128), None]
    for example, config, head in zip(examples, written, heads, strict=True):
        assert list(json.loads(example)) == list(config)
        assert read_dialect(config).scheme("lm_head") == head
    own = read_dialect(written[2])
    assert {name: own.scheme(name) for name in mixed} == mixed


# --- words, as docs/FORMAT.md draws them ---------------------------------------------------------


def word_of(tensor, *where):
    return tensor[where].item() & 0xFFFFFFFF


def test_four_bits():
    scheme, codes = W4A16(4, -1, symmetric=False), torch.arange(16)[None] % 9
    tensors = scheme.pack(codes, torch.ones(1, 1, dtype=torch.float16), torch.full((1, 1), 5))
    assert word_of(tensors["weight_packed"], 0, 0) == 0x76543210
    assert word_of(tensors["weight_packed"], 0, 1) == 0x65432108
    assert word_of(tensors["weight_zero_point"], 0, 0) == 0x00000005  # the rest is padding
    assert tensors["weight_shape"].tolist() == [1, 16]
    assert scheme.dequantize(tensors)[0, :3].tolist() == [-5.0, -4.0, -3.0]


def test_three_bits_straddle():
    """Code 10 has its two low bits at the top of word 0; code 21 its low bit at that of word 1."""
    for index, words in ((10, (0xC0000000, 1, 0)), (21, (0, 0x80000000, 3))):
        codes = torch.zeros(1, 32, dtype=torch.uint8)
        codes[0, index] = 7
        assert [word & 0xFFFFFFFF for word in layout.gptq(3).pack(codes)[:, 0].tolist()] == [*words]


def test_padding_bits_are_zero_and_ignored():
    scheme = W4A16(4, -1, symmetric=False)
    tensors = canonical(scheme, 7, 13)
    packed_words, zero_words = tensors["weight_packed"], tensors["weight_zero_point"]
    assert bool((packed_words[:, 1] >> 20 == 0).all()) and bool((zero_words >> 28 == 0).all())
    dirty = tensors | {
        "weight_packed": packed_words.clone(),
        "weight_zero_point": zero_words | -(2**28),
    }
    dirty["weight_packed"][:, 1] |= -(2**20)
    assert torch.equal(scheme.dequantize(dirty), scheme.dequantize(tensors))


# --- slices for tensor parallelism ---------------------------------------------------------------

RUN = {2: 16, 3: 32, 4: 8, 5: 32, 6: 16, 7: 32, 8: 4}  # codes that fill whole words
SLICED = [W4A16(bits, size, s) for bits in RUN for size in (32, -1) for s in (True, False)]


@pytest.mark.parametrize("scheme", SLICED, ids=str)
def test_slices_along_n(scheme):
    """Rows of everything; zero points by words, hence n at multiples of a run, but for the end."""
    n, k = 75, 96
    tensors = canonical(scheme, n, k)
    codes, scales, zeros = numbers(scheme, n, k)
    for start, end in ((0, 32), (32, 64), (64, n)):
        assert start % RUN[scheme.bits] == 0
        sliced = {
            "weight_packed": tensors["weight_packed"][start:end],
            "weight_scale": tensors["weight_scale"][start:end],
            "weight_shape": torch.tensor([end - start, k]),
        }
        if not scheme.symmetric:
            first, last = start * scheme.bits // 32, -(-end * scheme.bits // 32)
            sliced["weight_zero_point"] = tensors["weight_zero_point"][first:last]
        expected = scheme.pack(codes[start:end], scales[start:end], zeros[start:end])
        assert all(torch.equal(sliced[name], expected[name]) for name in expected)
        assert torch.equal(scheme.dequantize(sliced), scheme.dequantize(tensors)[start:end])


@pytest.mark.parametrize("scheme", SLICED, ids=str)
def test_slices_along_k(scheme):
    """Words by runs, scales and zeros by groups; one group per channel goes to every slice."""
    n, k = 9, 96
    tensors = canonical(scheme, n, k)
    for start, end in ((0, 32), (32, 64), (64, k)):
        groups = slice(None) if scheme.group_size == -1 else slice(start // 32, end // 32)
        sliced = {
            "weight_packed": tensors["weight_packed"][
                :, start * scheme.bits // 32 : end * scheme.bits // 32
            ],
            "weight_scale": tensors["weight_scale"][:, groups],
            "weight_shape": torch.tensor([n, end - start]),
        }
        if not scheme.symmetric:
            sliced["weight_zero_point"] = tensors["weight_zero_point"][:, groups]
        assert torch.equal(scheme.dequantize(sliced), scheme.dequantize(tensors)[:, start:end])
        dialect = CompressedTensors.read(CompressedTensors.config_of_all(scheme, []))
        dialect.to_canonical(scheme, sliced, n, end - start)  # a whole layer of its own


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(computed(), indent=1) + "\n", encoding="utf8")
