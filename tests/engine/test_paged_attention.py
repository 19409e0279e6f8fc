"""Paged attention against a dense fp64 reference, however sequences are cut and pages lie."""

import random

import pytest
import torch

from billfish.engine import attention
from billfish.engine.attention import Batch, PagedAttention
from billfish.engine.kv.cache import FORMATS, ChannelRange, Kv4Channels, Kv16, Room

CPU = torch.device("cpu")
HEAD_DIM, PAGE_TOKENS, PAGES, SCALE = 16, 4, 64, 0.3
WINDOWS = (None, 5)  # layer 0 sees everything, layer 1 five tokens
FP32 = 2e-6  # outputs are near 1: fp32 sums of another order, and torch's exp, good to some 1e-7
every_format = pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)


def build(kind=Kv16, kv_heads=2, dtype=torch.float32):
    return kind(Room(len(WINDOWS), PAGES, PAGE_TOKENS, kv_heads, HEAD_DIM, dtype, CPU))


class Sequence:
    """A text's q, k and v, its pages, and how many of its tokens are in the cache."""

    def __init__(self, length, heads, kv_heads, pages, dtype=torch.float32):
        self.q = torch.randn(length, heads, HEAD_DIM).to(dtype)
        self.k = torch.randn(length, kv_heads, HEAD_DIM).to(dtype)
        self.v = (torch.randn(length, kv_heads, HEAD_DIM) + 0.5).to(dtype)
        self.pages = torch.tensor(pages)
        self.done, self.length = 0, length

    def slots(self, first, count):
        place = torch.arange(first, first + count)
        return self.pages[place // PAGE_TOKENS] * PAGE_TOKENS + place % PAGE_TOKENS


def texts(lengths, heads=6, kv_heads=2, dtype=torch.float32):
    """Sequences over pages in random order, each with a page in reserve."""
    free = list(range(PAGES))
    random.Random(len(lengths)).shuffle(free)
    return [
        Sequence(n, heads, kv_heads, [free.pop() for _ in range(n // PAGE_TOKENS + 2)], dtype)
        for n in lengths
    ]


def step(paged, work, layer):
    """One batch of (sequence, count) pieces -> the output of each."""
    starts, flat = [], 0
    for _, count in work:
        starts.append(flat)
        flat += count
    batch = Batch(
        starts,
        [count for _, count in work],
        [text.done + count for text, count in work],
        [text.pages for text, _ in work],
        torch.cat([text.slots(text.done, count) for text, count in work]),
    )

    def joined(name):
        return torch.cat([getattr(t, name)[t.done : t.done + count] for t, count in work])

    out = paged(layer, joined("q"), joined("k"), joined("v"), batch)
    for text, count in work:
        text.done += count
    return list(out.split([count for _, count in work]))


def alone(paged, text, layer, size):
    """The whole text in pieces of `size`."""
    text.done, parts = 0, []
    while text.done < text.length:
        parts += step(paged, [(text, min(size, text.length - text.done))], layer)
    return torch.cat(parts)


def dense(q, k, v, window, sinks=None):
    """fp64, no pages, no cache."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * SCALE
    place = torch.arange(len(q))
    hidden = place[None] > place[:, None]
    if window is not None:
        hidden |= place[None] <= place[:, None] - window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        joined = sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)
        scores = torch.cat((scores, joined), -1)
    weights = scores.softmax(-1)[..., : len(q)]
    return torch.einsum("hij,jhd->ihd", weights, v)


def expected(cache, text, layer, sinks=None):
    """From what the cache gives back."""
    k, v = cache.read(layer, text.pages, text.length)
    return dense(text.q, k, v, WINDOWS[layer], sinks)


def ragged(seed):
    """Steps of a scheduler: decodes and chunks of all sizes mixed, until all texts are through."""
    source = random.Random(seed)

    def schedule(all_texts):
        while any(text.done < text.length for text in all_texts):
            open_ = [text for text in all_texts if text.done < text.length]
            chosen = source.sample(open_, source.randint(1, len(open_)))
            yield [(t, min(source.choice((1, 1, 2, 7, 30)), t.length - t.done)) for t in chosen]

    return schedule


def in_turns(paged, all_texts, layer, seed):
    """All texts whole, by a ragged schedule."""
    outs = {id(text): [] for text in all_texts}
    for work in ragged(seed)(all_texts):
        for (text, _), out in zip(work, step(paged, work, layer), strict=True):
            outs[id(text)].append(out)
    return [torch.cat(outs[id(text)]) for text in all_texts]


@every_format
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("heads,kv_heads", [(6, 2), (3, 3), (4, 1)])
def test_ragged_batches_match_the_dense_reference(kind, layer, heads, kv_heads):
    cache = build(kind, kv_heads)
    paged = PagedAttention(cache, SCALE, WINDOWS)
    all_texts = texts([1, 4, 5, 13, 40, 27], heads, kv_heads)
    for text, out in zip(all_texts, in_turns(paged, all_texts, layer, heads), strict=True):
        assert out.shape == text.q.shape and out.dtype == text.q.dtype
        assert (out - expected(cache, text, layer)).abs().max() < FP32


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("heads,kv_heads", [(6, 2), (3, 3)])
def test_sinks_join_every_softmax(layer, heads, kv_heads, monkeypatch):
    """In decodes, whole prompts and chunks; heads of one layer have sinks that differ much."""
    monkeypatch.setattr(attention, "MASK_ROWS", 8)
    sinks = torch.linspace(-6, 6, heads).view(kv_heads, -1)
    cache = build(kv_heads=kv_heads)
    paged = PagedAttention(cache, SCALE, WINDOWS, [sinks, sinks])
    all_texts = texts([1, 4, 5, 13, 40, 27], heads, kv_heads)
    for text, out in zip(all_texts, in_turns(paged, all_texts, layer, heads), strict=True):
        exact = expected(cache, text, layer, sinks)
        assert (out - exact).abs().max() < FP32
        assert (alone(paged, text, layer, text.length) - exact).abs().max() < FP32
        without = expected(cache, text, layer)
        assert (without - exact).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", [0, 1])
def test_16_bit_outputs_are_rounded_once(dtype, layer):
    cache = build(dtype=dtype)
    (text,) = texts([40], dtype=dtype)
    out = alone(PagedAttention(cache, SCALE, WINDOWS), text, layer, 7)
    exact = expected(cache, text, layer)
    assert out.dtype == dtype
    unit = torch.finfo(dtype).eps / 2
    assert ((out.double() - exact).abs() <= exact.abs() * unit * 1.01 + FP32).all()


@every_format
@pytest.mark.parametrize("layer", [0, 1])
def test_chunks_do_not_change_the_result(kind, layer):
    """Within fp32 rounding. The cache's bytes are the same to the bit."""
    (text,) = texts([41])
    outs, held = [], []
    for size in (41, 1, 3, 16):
        cache = build(kind)
        outs.append(alone(PagedAttention(cache, SCALE, WINDOWS), text, layer, size))
        held.append(torch.stack(cache.read(layer, text.pages, 41)))
    for out, numbers in zip(outs[1:], held[1:], strict=True):
        assert (out - outs[0]).abs().max() < FP32
        assert torch.equal(numbers, held[0])


@pytest.mark.parametrize("layer", [0, 1])
def test_long_chunks_are_masked_in_blocks(layer, monkeypatch):
    monkeypatch.setattr(attention, "MASK_ROWS", 8)
    cache = build()
    (text,) = texts([60])
    out = alone(PagedAttention(cache, SCALE, WINDOWS), text, layer, 29)
    assert (out - expected(cache, text, layer)).abs().max() < FP32


@every_format
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("read_tokens", [1, 16, 10_000])
def test_a_result_does_not_depend_on_the_batch(kind, layer, read_tokens, monkeypatch):
    monkeypatch.setattr(attention, "READ_TOKENS", read_tokens)
    all_texts = texts([9, 22, 14, 30])
    together = PagedAttention(build(kind), SCALE, WINDOWS)
    outs = [
        torch.cat(pair)
        for pair in zip(
            step(together, [(text, text.length - 1) for text in all_texts], layer),
            step(together, [(text, 1) for text in all_texts], layer),
            strict=True,
        )
    ]
    for text, out in zip(all_texts, outs, strict=True):
        single = alone(PagedAttention(build(kind), SCALE, WINDOWS), text, layer, text.length)
        assert (out - single).abs().max() < FP32


@every_format
@pytest.mark.parametrize("layer", [0, 1])
def test_where_pages_lie_does_not_matter(kind, layer):
    (text,) = texts([33])
    outs = []
    for pages in (range(10), range(50, 40, -1), random.Random(1).sample(range(PAGES), 10)):
        text.pages = torch.tensor(list(pages))
        outs.append(alone(PagedAttention(build(kind), SCALE, WINDOWS), text, layer, 11))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@every_format
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("size", [1, 7, 100])
def test_nothing_but_a_sequence_s_own_tokens_reaches_it(kind, layer, size):
    """NaN in every other slot: other pages, and the rest of its own last page."""
    clean, poisoned = build(kind), build(kind)
    nan = torch.full((PAGES * PAGE_TOKENS, 2, HEAD_DIM), torch.nan)
    poisoned.write(layer, torch.arange(PAGES * PAGE_TOKENS), nan, nan)
    one, other = texts([18, 27])
    outs = [alone(PagedAttention(c, SCALE, WINDOWS), one, layer, size) for c in (clean, poisoned)]
    assert outs[1].isfinite().all() and torch.equal(*outs)

    # A sequence of NaN in the same batch breaks itself only.
    other.k[3], other.v[5] = torch.nan, torch.nan
    one.done = 0
    paged = PagedAttention(poisoned, SCALE, WINDOWS)
    while one.done < one.length:
        count = min(size, one.length - one.done)
        first = one.done
        mine, theirs = step(paged, [(one, count), (other, count)], layer)
        assert (mine - outs[0][first : first + count]).abs().max() < FP32
    if layer == 0:  # from token 5 on every one of them sees the NaN
        assert theirs[-1].isnan().all()


def test_a_window_reads_only_pages_it_reaches(monkeypatch):
    cache = build()
    paged = PagedAttention(cache, SCALE, WINDOWS)
    (text,) = texts([40])
    step(paged, [(text, 37)], 1)
    asked = []
    read = cache.read

    def watched(layer, pages, count):
        asked.append((pages.tolist(), count))
        return read(layer, pages, count)

    monkeypatch.setattr(cache, "read", watched)
    step(paged, [(text, 1)], 1)  # token 37 sees 33 to 37: pages 8 and 9
    step(paged, [(text, 2)], 1)  # tokens 38 and 39 see 34 to 39
    assert asked == [(text.pages[8:10].tolist(), 8), (text.pages[8:10].tolist(), 8)]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    "lengths,read_tokens,reads",  # of pages of 4 tokens
    [
        ([21, 24, 22, 23], 96, [4 * 24]),
        ([21, 24, 22, 23], 95, [3 * 24, 24]),  # the last does not fit
        ([17, 36, 20, 25, 33], 999, [3 * 36, 2 * 20]),  # 17 and 20 are too short for 36
    ],
)
def test_decodes_are_read_together(lengths, read_tokens, reads, layer, monkeypatch):
    monkeypatch.setattr(attention, "READ_TOKENS", read_tokens)
    cache = build()
    nan = torch.full((PAGES * PAGE_TOKENS, 2, HEAD_DIM), torch.nan)
    cache.write(layer, torch.arange(PAGES * PAGE_TOKENS), nan, nan)
    paged, all_texts = PagedAttention(cache, SCALE, (None, None)), texts(lengths)
    for text in all_texts:
        step(paged, [(text, text.length - 1)], layer)
    asked, read = [], cache.read

    def watched(layer, pages, count):
        asked.append(count)
        return read(layer, pages, count)

    monkeypatch.setattr(cache, "read", watched)
    outs = step(paged, [(text, 1) for text in all_texts], layer)
    monkeypatch.undo()
    assert asked == reads
    for text, out in zip(all_texts, outs, strict=True):
        k, v = cache.read(layer, text.pages, text.length)
        assert (out - dense(text.q, k, v, None)[-1:]).abs().max() < FP32


def test_pages_of_another_request_serve_as_a_prefix():
    for kind in FORMATS.values():
        cache = build(kind)
        paged = PagedAttention(cache, SCALE, WINDOWS)
        first, second = texts([20, 20])
        whole = alone(paged, first, 0, 20)
        second.q, second.k, second.v = first.q, first.k, first.v
        second.pages[:3] = first.pages[:3]  # 12 tokens taken over
        second.done = 12
        (rest,) = step(paged, [(second, 8)], 0)
        assert (rest - whole[12:]).abs().max() < FP32


def test_layers_are_apart():
    cache = build()
    paged = PagedAttention(cache, SCALE, (None, None))
    one, other = texts([12, 12])
    other.pages = one.pages
    first = alone(paged, one, 0, 12)
    alone(paged, other, 1, 12)
    one.done = 11
    (again,) = step(paged, [(one, 1)], 0)
    assert (again - first[11:]).abs().max() < FP32


def test_channel_steps_serve_attention_too():
    (text,) = texts([25])
    ranges = ChannelRange.empty(len(WINDOWS), 2, HEAD_DIM)
    for layer in range(len(WINDOWS)):
        ranges.update(layer, text.k, text.v)
    layers, _, kv_heads, head_dim = ranges.low.shape
    room = Room(layers, PAGES, PAGE_TOKENS, kv_heads, head_dim, torch.float32, CPU)
    cache = Kv4Channels(room)
    cache.set_ranges(ranges)
    paged = PagedAttention(cache, SCALE, WINDOWS)
    for layer in range(len(WINDOWS)):
        out = alone(paged, text, layer, 6)
        assert (out - expected(cache, text, layer)).abs().max() < FP32


def test_kv8_and_kv4_stay_near_kv16():
    (text,) = texts([60])
    exact = alone(PagedAttention(build(), SCALE, WINDOWS), text, 0, 60)
    off = {
        name: (alone(PagedAttention(build(kind), SCALE, WINDOWS), text, 0, 60) - exact).std().item()
        for name, kind in FORMATS.items()
    }
    assert off["kv16"] == 0
    assert 1e-5 < off["kv8"] < 0.01 < off["kv4"] < 0.1


@pytest.mark.parametrize(
    "starts,counts,lengths", [([0], [3], [2]), ([1], [2], [2]), ([0], [1], [1]), ([0, 2], [2], [2])]
)
def test_a_batch_that_cannot_be_is_stopped(starts, counts, lengths):
    with pytest.raises(AssertionError):
        Batch(starts, counts, lengths, [torch.tensor([0])], torch.arange(2))
