"""w4a16_24's records: unpacking inverts packing bit for bit, and an independent reader agrees.

The reader below follows the opening comment of sparse.cuh and the PTX ISA's figures of mma.sp and
uses nothing of arrange.py: plain loops from (row, kept input) to a bit of a record.
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from billfish.errors import UserError
from billfish.schemes.w4a16_24 import W4A16Sparse
from billfish.schemes.w4a16_24.cuda import arrange

FP16, BF16 = torch.float16, torch.bfloat16
SCHEMES = [W4A16Sparse(size) for size in (32, 64, 128, -1)]


def draw(scheme, n, k, dtype, seed):
    """Random weights, with scales of any bits: NaN, too."""
    source = torch.Generator().manual_seed(seed)
    tensors = scheme.random_tensors(n, k, dtype, source)
    scales = torch.randint(-(2**15), 2**15, tensors["weight_scale"].shape, generator=source)
    return {**tensors, "weight_scale": scales.to(torch.int16).view(dtype)}


def same(left, right):
    assert set(left) == set(right)
    for name, tensor in left.items():
        other = right[name]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, name
        assert other.is_contiguous(), name
        if tensor.is_floating_point():
            tensor, other = tensor.view(torch.int16), other.view(torch.int16)
        assert torch.equal(tensor, other), name


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 200),
    blocks=st.integers(1, 20),
    more=st.integers(0, 127),
    scheme=st.sampled_from(SCHEMES),
    dtype=st.sampled_from([FP16, BF16]),
    seed=st.integers(0, 2**31),
)
@example(n=1, blocks=1, more=2, scheme=W4A16Sparse(-1), dtype=FP16, seed=0)  # one four, cut
@example(n=64, blocks=12, more=0, scheme=W4A16Sparse(32), dtype=BF16, seed=0)  # whole records
def test_unpack_inverts_pack(n, blocks, more, scheme, dtype, seed):
    k = blocks * scheme.group_size if scheme.group_size > 0 else 32 * (blocks - 1) + more + 1
    tensors = draw(scheme, n, k, dtype, seed)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    shape, records = arrange.pack(scheme, tensors)
    same(tensors, before)  # its sources are the caller's
    assert records.dtype == torch.int32 and records.is_contiguous()
    assert records.shape == (-(-n // 64), -(-k // 128), shape.record_bytes // 4)
    assert shape.record_bytes % 16 == 0  # bulk copies move multiples of 16 bytes
    same(before, arrange.unpack(scheme, shape, records))


def weights_of(record, group, dtype):
    """The 64 x 128 weights of one record's bytes, lane by lane as the tensor cores unfold them."""
    words = record[:512].view(4, 32, 4)
    meta = record[512:768].view(4, 32, 2)
    scales = record[768:].contiguous().view(dtype).view(-1, 2, 8, 4)  # [group][half][quad][row]
    weights = torch.zeros(64, 128)
    for n16 in range(4):
        for lane in range(32):
            quad, t = divmod(lane, 4)
            for step in range(4):
                word = int(words[n16, lane, step]) & 0xFFFFFFFF
                for register in range(4):
                    row, four = quad + register % 2 * 8, register // 2 * 4 + t
                    # metadata of this row and step: selector step % 2, pair of lanes by its half
                    owner = 4 * quad + step % 2 * 2 + four // 4
                    places = int(meta[n16, owner, step // 2]) >> (row // 8 * 16 + four % 4 * 4)
                    for odd in range(2):
                        code = word >> (16 * odd + 4 * register) & 15
                        k = 32 * step + 4 * four + (places >> 2 * odd & 3)
                        n = 16 * n16 + row
                        scale = scales[k // group, n // 32, n % 8, n % 32 // 8].float()
                        assert weights[n, k] == 0  # no place twice
                        weights[n, k] = (code - 8) * scale
    return weights


@pytest.mark.parametrize(
    ("n", "k", "scheme", "dtype"),
    [
        (64, 256, W4A16Sparse(128), FP16),
        (70, 384, W4A16Sparse(64), BF16),
        (65, 96, W4A16Sparse(32), FP16),
        (3, 131, W4A16Sparse(-1), BF16),
    ],
)
def test_records_are_what_the_tensor_cores_read(n, k, scheme, dtype):
    tensors = scheme.random_tensors(n, k, dtype, torch.Generator().manual_seed(n * k))
    shape, records = arrange.pack(scheme, tensors)
    made = torch.zeros(shape.bands * 64, shape.k_tiles * 128)
    for band in range(shape.bands):
        for tile in range(shape.k_tiles):
            record = records[band, tile]
            made[64 * band : 64 * band + 64, 128 * tile : 128 * tile + 128] = weights_of(
                record, shape.record_group, dtype
            )
    assert torch.equal(made[:n, :k], scheme.dequantize(tensors))
    assert not made[n:].any() and not made[:, k:].any()


def test_metadata_ascends_in_padding_too():
    """mma.sp with ordered metadata takes ascending places alone."""
    scheme = W4A16Sparse(-1)
    tensors = scheme.random_tensors(5, 30, FP16, torch.Generator().manual_seed(1))
    _, records = arrange.pack(scheme, tensors)
    meta = records[..., 512:768].contiguous().view(torch.uint8)
    fours = torch.cat([meta & 15, meta >> 4])
    assert bool(((fours & 3) < (fours >> 2)).all())


def test_scales_of_another_type_are_refused():
    scheme = W4A16Sparse(32)
    tensors = scheme.random_tensors(64, 64, torch.float32, torch.Generator().manual_seed(1))
    with pytest.raises(UserError, match="float32; CUDA kernels take float16 and bfloat16"):
        arrange.pack(scheme, tensors)
