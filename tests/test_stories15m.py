"""scripts/stories15m.py against llama2.c's own formulas, on files written by hand."""

import struct

import numpy as np
import pytest
import torch
from stories15m import read_model, read_tokenizer

from billfish.errors import UserError

DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCABULARY, CONTEXT = 16, 24, 2, 4, 2, 19, 8
HEAD = DIM // HEADS
SHAPES = {
    "embedding": (VOCABULARY, DIM),
    "norm1": (LAYERS, DIM),
    "q": (LAYERS, DIM, DIM),
    "k": (LAYERS, KV_HEADS * HEAD, DIM),
    "v": (LAYERS, KV_HEADS * HEAD, DIM),
    "o": (LAYERS, DIM, DIM),
    "norm2": (LAYERS, DIM),
    "w1": (LAYERS, HIDDEN, DIM),
    "w2": (LAYERS, DIM, HIDDEN),
    "w3": (LAYERS, HIDDEN, DIM),
    "norm": (DIM,),
    "rotations": (2, CONTEXT, HEAD // 2),
    "head": (VOCABULARY, DIM),
}


def written(shared):
    draw = np.random.default_rng(0)
    w = {name: draw.normal(0, 0.5, shape).astype(np.float32) for name, shape in SHAPES.items()}
    if shared:
        del w["head"]
    vocabulary = VOCABULARY if shared else -VOCABULARY
    header = struct.pack("7i", DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, vocabulary, CONTEXT)
    return w, header + b"".join(weight.tobytes() for weight in w.values())


def norm(x, weight):
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def rotated(x):  # (tokens, heads, HEAD): pairs of neighbours turn together, as in run.c
    angle = np.arange(len(x))[:, None] / 10000 ** (np.arange(0, HEAD, 2) / HEAD)
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)[:, None]
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def forward(w, ids):
    x, seen = w["embedding"][ids], np.tril(np.ones((len(ids), len(ids)), bool))
    for i in range(LAYERS):
        h = norm(x, w["norm1"][i])
        q, k, v = ((h @ w[name][i].T).reshape(len(ids), -1, HEAD) for name in "qkv")
        k, v = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (rotated(k), v))
        score = np.einsum("qhd,khd->hqk", rotated(q), k) / HEAD**0.5
        weight = np.where(seen, np.exp(score), 0)
        weight /= weight.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weight, v).reshape(len(ids), DIM) @ w["o"][i].T
        h = norm(x, w["norm2"][i])
        gate = h @ w["w1"][i].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["w3"][i].T)) @ w["w2"][i].T
    return norm(x, w["norm"]) @ w.get("head", w["embedding"]).T


@pytest.mark.parametrize("shared", [True, False])
def test_logits_are_llama2_c_s(shared):
    w, file = written(shared)
    ids = [1, 5, 3, 18, 0, 7, 7, 2]
    with torch.inference_mode():
        logits = read_model(file)(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(logits, forward(w, ids), rtol=2e-4, atol=2e-4)


def test_a_file_that_is_not_whole_is_refused():
    with pytest.raises(UserError, match="not whole"):
        read_model(written(shared=True)[1] + bytes(4))


def test_the_tokenizer_merges_by_score_and_falls_back_to_bytes():
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(chr(byte).encode() for byte in range(256))]
    scores = [0.0] * len(pieces)
    merged = [b"ab", b" a", b"bc", b" ab", *(bytes([c]) for c in b" abc")]  # the better the earlier
    pieces += merged
    scores += [-float(rank) for rank in range(len(merged))]
    entries = zip(pieces, scores, strict=True)
    file = struct.pack("i", 8) + b"".join(struct.pack("<fi", s, len(p)) + p for p, s in entries)

    tokenizer = read_tokenizer(file)
    ab, bc, space_ab = (pieces.index(piece) for piece in (b"ab", b"bc", b" ab"))
    c = pieces.index(b"c", 259)
    assert tokenizer.bos_token_id == 1 and len(tokenizer) == len(pieces)
    for text, ids in {
        "abc": [space_ab, c],  # not " a" and "bc": "ab" has the best score
        "abab": [space_ab, ab],
        "abbc": [space_ab, bc],
        "ab\né": [space_ab, 3 + 0x0A, 3 + 0xC3, 3 + 0xA9],
        "ab<s> ab": [space_ab, 1, space_ab],
    }.items():
        assert tokenizer(text).input_ids == [1, *ids], text
        assert tokenizer.decode(ids) == text
