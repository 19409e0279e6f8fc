"""Every rule of choosing a token, against formulas, a plain reference and counted draws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from billfish.engine import sampling
from billfish.engine.sampling import Chooser, Chosen, SamplingParams, choose_tokens
from billfish.errors import UserError

NONE = frozenset()
WIDTH = 50


def chooser(width=WIDTH, prompt=(), eos=NONE, index=0, **asked):
    return Chooser(SamplingParams(**asked), prompt, width, eos, index)


def token(row, **asked):
    """Of one row of logits, chosen once and greedily unless told otherwise."""
    (chosen,) = choose_tokens(
        torch.tensor([row]), [chooser(len(row), **{"temperature": 0.0, **asked})]
    )
    return chosen.token


def draws(row, count, **asked):
    """Tokens of one sequence over the same logits again and again."""
    row, one = torch.as_tensor(row)[None], chooser(len(row), **{"seed": 1, **asked})
    return np.array([choose_tokens(row, [one])[0].token for _ in range(count)])


def reference(row, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0):
    """The distribution, in the most obvious way."""
    p = np.exp((np.array(row, np.float64) - max(row)) / temperature)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    kept = [i for i in order if p[i] >= min_p * p.max()]
    if top_k:
        kept = kept[:top_k]
    total, mass, nucleus = sum(p[i] for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        mass += p[i]
        if mass >= top_p * total:
            break
    result = np.zeros(len(row))
    result[nucleus] = p[nucleus] / p[nucleus].sum()
    return result


def assert_drawn_from(expected, tokens):
    counts = np.bincount(tokens, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    wanted = expected * len(tokens)
    many = wanted >= 5
    squares = ((counts - wanted)[many] ** 2 / wanted[many]).sum()
    freedom = max(many.sum() - 1, 1)
    # Four deviations of chi-square: one seed in about 30,000 would fail, and seeds are fixed.
    assert squares < freedom + 4 * math.sqrt(2 * freedom) + 4, squares


ROW = (torch.randn(WIDTH, generator=torch.Generator().manual_seed(5)) * 2).tolist()
WAYS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 7},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"min_p": 0.25, "top_p": 0.95},
    {"min_p": 0.25, "top_k": 30},
    {"temperature": 1.5, "min_p": 0.02, "top_k": 20, "top_p": 0.9},
]


@pytest.mark.parametrize("asked", WAYS, ids=str)
def test_draws_follow_the_distribution(asked):
    assert_drawn_from(reference(ROW, **asked), draws(ROW, 1000, **asked))


def test_draws_of_other_sequences_follow_it_too():
    """One draw each of 2,000 seeds, and of n = 128: streams are independent, not only long."""
    batch = torch.tensor([ROW] * 2000)
    drawn = choose_tokens(batch, [chooser(seed=seed) for seed in range(2000)])
    assert_drawn_from(reference(ROW), [chosen.token for chosen in drawn])
    drawn = choose_tokens(batch, [chooser(seed=7, index=index, n=128) for index in range(2000)])
    assert_drawn_from(reference(ROW), [chosen.token for chosen in drawn])


def test_a_wide_row_is_drawn_across_blocks():
    row = torch.full((5000,), -20.0)
    places = [0, 511, 512, 1023, 4607, 4999]
    row[places] = torch.tensor([1.0, 2.0, 0.5, 1.5, 1.0, 2.0])
    assert_drawn_from(reference(row.tolist()), draws(row, 2000))


@pytest.mark.parametrize("first", [0, 3, 511, 512, 700])
@pytest.mark.parametrize("number", [0.0, 0.3, 1 - 2.0**-52])
def test_the_ends_of_the_sums_are_not_beyond_them(first, number, monkeypatch):
    """Impossible tokens before, between and after the possible ones, which have odd sums."""
    row = torch.full((1, 1300), -math.inf)
    row[0, [first, first + 5, first + 555]] = torch.tensor([0.1, 0.7, 0.3])
    monkeypatch.setattr(Chooser, "uniform", lambda self: number)
    (chosen,) = choose_tokens(row, [chooser(1300)])
    assert chosen.token == first + {0.0: 0, 0.3: 5}.get(number, 555)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_kept_tokens_are_the_references(data):
    """Every token that may come does, none that may not; ties and whole tails included."""
    values = st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5, 2.0, -math.inf])
    row = data.draw(st.lists(values, min_size=1, max_size=12).filter(lambda r: max(r) > -math.inf))
    asked = {
        "temperature": data.draw(st.sampled_from([0.5, 1.0, 3.0])),
        "top_k": data.draw(st.integers(0, 14)),
        "top_p": data.draw(st.sampled_from([0.05, 0.33, 0.61, 0.87, 1.0])),
        "min_p": data.draw(st.sampled_from([0.0, 0.013, 0.29])),
    }
    expected = reference(row, **asked)
    tokens = draws(row, 60, seed=data.draw(st.integers(0, 99)), **asked)
    assert (expected[tokens] > 0).all()
    assert set(np.flatnonzero(expected > 0.2)) <= set(tokens)


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("asked", [{"top_p": 0.9}, {"top_k": 3000}, {"top_k": 1500, "top_p": 0.8}])
def test_a_nucleus_of_any_size(scale, asked):
    """Flat rows need far more than the first ranking holds; the mass that comes must be right."""
    row = (torch.randn(40_000) * scale).tolist()
    expected = reference(row, **asked)
    tokens = draws(row, 150, **asked)
    assert (expected[tokens] > 0).all()
    order = np.argsort(-expected)
    half = order[: int((expected[order].cumsum() < 0.5).sum()) + 1]
    share = expected[half].sum()
    near = 4 * math.sqrt(share * (1 - share) / 150) + 1e-9
    assert abs(np.isin(tokens, half).mean() - share) < near


def test_equals_go_to_the_lowest_ids():
    flat = [0.0] * 4000
    assert token([1.0, 3.0, 3.0, 3.0]) == 1
    assert set(draws(flat, 60, top_k=3)) == {0, 1, 2}
    assert set(draws(flat, 60, top_p=0.001)) == {0, 1, 2, 3}
    assert set(draws([0.0, 5.0, 5.0, 5.0], 60, top_k=2)) == {1, 2}
    assert set(draws([0.0, 5.0, 5.0, 5.0], 60, top_p=0.5)) == {1, 2}


def test_greedy_temperatures_and_the_smallest_sets():
    best = int(np.argmax(ROW))
    assert set(draws(ROW, 20, temperature=0.0)) == {best}
    assert set(draws(ROW, 20, temperature=1e-9)) == {best}
    assert set(draws(ROW, 20, temperature=1e-4)) == {best}
    assert set(draws(ROW, 20, top_k=1)) == {best}
    assert set(draws(ROW, 20, top_p=1e-9)) == {best}
    assert set(draws(ROW, 20, min_p=1.0)) == {best}
    assert len(set(draws(ROW, 300, temperature=100, top_k=10**9))) > 40  # nearly uniform


def generated(asked, others, row, steps=12):
    """Tokens of the sequence `asked` beside others, at the given row."""
    torch.manual_seed(3)
    mine = chooser(**asked, prompt=[1, 2])
    batch = [chooser(**other, prompt=[4]) for other in others]
    batch.insert(row, mine)
    tokens = []
    for step in range(steps):
        logits = torch.randn(len(batch), WIDTH, generator=torch.Generator().manual_seed(step))
        own = torch.randn(WIDTH, generator=torch.Generator().manual_seed(100 + step))
        logits[row] = own
        tokens.append(choose_tokens(logits, batch)[row])
    return tokens


OTHERS = [
    {"temperature": 0.0},
    {"seed": 11, "top_k": 2, "logprobs": 3},
    {"seed": 9, "repetition_penalty": 1.7, "logit_bias": {3: 50.0}},
    {"top_p": 0.3, "min_p": 0.01, "presence_penalty": 1.0},
]


@pytest.mark.parametrize("asked", [{**way, "seed": 9, "logprobs": 2} for way in WAYS], ids=str)
def test_the_batch_changes_nothing(asked):
    asked = {**asked, "frequency_penalty": 0.4}
    alone = generated(asked, [], 0)
    assert generated(asked, OTHERS, 0) == alone
    assert generated(asked, OTHERS * 3, 7) == alone
    assert generated(asked, [asked, {"temperature": 0.0}], 2) == alone
    if asked.get("top_k") != 1:
        assert [c.token for c in generated({**asked, "seed": 10}, [], 0)] != [
            c.token for c in alone
        ]


def test_rows_drawn_together_are_as_rows_drawn_alone(monkeypatch):
    """On a GPU all rows are one part; the same code, here on the CPU."""
    from billfish.engine import sampling

    many = [*OTHERS, *({**way, "seed": 5} for way in WAYS)]
    many = [{"seed": 1, **one} for one in many]
    logits = torch.randn(len(many), 3000)
    logits[::2] *= 0.1  # flat: a nucleus past the first ranking, in some rows of the part
    alone = [
        choose_tokens(logits[i : i + 1], [chooser(3000, **one)])[0] for i, one in enumerate(many)
    ]
    monkeypatch.setattr(sampling, "_parts", lambda rows, device: [(rows, rows)] if rows else [])
    together = choose_tokens(logits, [chooser(3000, **one) for one in many])
    assert [c.token for c in together] == [c.token for c in alone]
    assert [i for i, _ in together[1].top] == [i for i, _ in alone[1].top]


def test_seeds_and_indices():
    first = draws(ROW, 20, seed=3)
    assert (first == draws(ROW, 20, seed=3)).all()
    assert (first != draws(ROW, 20, seed=4)).any()
    assert (first != draws(ROW, 20, seed=3, index=1)).any()
    assert (draws(ROW, 20, seed=-1) != draws(ROW, 20, seed=1)).any()
    assert (draws(ROW, 20, seed=None) != draws(ROW, 20, seed=None)).any()
    # Philox is a standard: other numbers would mean other texts for every seed in use.
    one = chooser(seed=3)
    assert [one.uniform() for _ in range(3)] == FIRST_NUMBERS


FIRST_NUMBERS = [0.9342820204007574, 0.07916148013208679, 0.3828279896411555]


def test_bias():
    assert token([0.0, 1.0, 2.0], logit_bias={0: 2.5}) == 0
    assert token([0.0, 1.0, 2.0], logit_bias={2: -100.0}) == 1
    moved = [*ROW]
    moved[4] += 3.0
    assert_drawn_from(reference(moved), draws(ROW, 2000, logit_bias={4: 3.0}))


def test_penalties_follow_their_formulas():
    row = torch.tensor([3.0, 2.0, -1.0, 1.0, 0.5, -0.5])
    rules = {"repetition_penalty": 1.5, "presence_penalty": 0.75, "frequency_penalty": 0.25}
    bias = {0: -0.5, 2: 1.25, 5: 0.1}
    expected, prompt, output = row.clone(), [0, 2, 2], []
    one = chooser(6, prompt=prompt, seed=0, temperature=0.0, logit_bias=bias, **rules)
    for _ in range(8):
        expected = row.clone()
        for i in range(6):
            expected[i] += bias.get(i, 0.0)
            if i in prompt or i in output:
                expected[i] = expected[i] / 1.5 if expected[i] > 0 else expected[i] * 1.5
            expected[i] -= 0.25 * output.count(i) + 0.75 * (i in output)
        before = row.clone()
        (chosen,) = choose_tokens(row[None], [one])
        assert chosen.token == int(expected.argmax())
        assert torch.equal(row, before)  # the caller's logits stay
        output.append(chosen.token)
    assert len(set(output)) > 3
    assert one.drawn == 8


def test_the_prompt_counts_for_repetition_alone():
    row = [2.0, 1.9]
    assert token(row, prompt=[0], repetition_penalty=1.2) == 1
    assert token(row, prompt=[0], presence_penalty=2.0, frequency_penalty=2.0) == 0
    assert token(row, prompt=[0, 99], repetition_penalty=0.5) == 0  # 99: an image's placeholder


def test_min_tokens_bars_the_ends_until_then():
    asked = {"min_tokens": 3, "stop_token_ids": [2], "temperature": 0.0}
    one = chooser(4, eos=frozenset({0, 77}), **asked)
    row = torch.tensor([[9.0, 1.0, 8.0, 0.0]])
    assert [choose_tokens(row, [one])[0].token for _ in range(5)] == [1, 1, 1, 0, 0]


def test_not_a_number_fails_its_row_alone():
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [[nan, 1.0, 2.0], [nan, nan, nan], [0.0, 1.0, -inf], [-inf, nan, -inf], [-inf, inf, inf]]
    )
    for asked in ({"temperature": 0.0}, {"top_k": 1}, {"seed": 1, "top_p": 0.1}):
        choosers = [chooser(3, logprobs=3, **asked) for _ in range(5)]
        a, b, c, d, e = choose_tokens(logits, choosers)
        assert isinstance(b, ArithmeticError) and isinstance(d, ArithmeticError)
        assert "token 1 of this sequence" in str(b)
        assert (a.token, c.token, e.token) == (2, 1, 1)
        assert a.logprob == pytest.approx(-math.log(1 + math.exp(-1)))
        assert [t for t, _ in a.top] == [2, 1] and all(math.isfinite(v) for _, v in a.top)
        assert [one.drawn for one in choosers] == [1, 0, 1, 0, 1]
    barred = chooser(1, eos=frozenset({0}), min_tokens=1)
    (failed,) = choose_tokens(torch.zeros(1, 1), [barred])
    assert isinstance(failed, ArithmeticError) and "min_tokens" in str(failed)
    waiting = chooser(2, eos=frozenset({0}), min_tokens=1, logprobs=0)
    (fine,) = choose_tokens(torch.tensor([[nan, 1.0]]), [waiting])
    assert fine == Chosen(1, 0.0)  # a barred NaN does not reach the log probabilities


def test_logprobs_are_the_models_own():
    row = torch.tensor(ROW)
    expected = row.log_softmax(-1)
    for asked in ({"temperature": 0.0}, {"temperature": 3.0, "top_k": 4, "logit_bias": {8: 9.0}}):
        chosen = choose_tokens(row[None], [chooser(logprobs=5, seed=2, **asked)])[0]
        assert chosen.logprob == pytest.approx(float(expected[chosen.token]), abs=1e-5)
        values, ids = expected.topk(5)
        assert [i for i, _ in chosen.top] == ids.tolist()
        assert [v for _, v in chosen.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert choose_tokens(row[None], [chooser(logprobs=0)])[0].top == ()
    assert choose_tokens(row[None], [chooser()])[0].logprob is None
    tied = choose_tokens(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]), [chooser(5, logprobs=2)])[0]
    assert [i for i, _ in tied.top] == [1, 2]
    assert len(choose_tokens(torch.zeros(1, 3), [chooser(3, logprobs=20)])[0].top) == 3


def test_shapes_and_types():
    assert choose_tokens(torch.zeros(0, 9), []) == []
    with pytest.raises(ValueError, match=r"logits \(2, 50\).*1 choosers"):
        choose_tokens(torch.zeros(2, WIDTH), [chooser()])
    with pytest.raises(ValueError, match="vocabulary"):
        choose_tokens(torch.zeros(1, 9), [chooser()])
    half = torch.tensor([ROW], dtype=torch.bfloat16)
    assert choose_tokens(half, [chooser(temperature=0.0)])[0].token == int(half.argmax())


def test_what_is_given_is_kept_in_one_form():
    bias = {3: 1}
    params = SamplingParams(stop="end", stop_token_ids=[4, 5], top_k=-1, logit_bias=bias)
    bias[9] = 5
    assert params.stop == ("end",) and params.stop_token_ids == (4, 5) and params.top_k == 0
    assert params.logit_bias == {3: 1}
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams() == SamplingParams()
    SamplingParams(n=128, temperature=7, seed=2**63 - 1, logprobs=20, repetition_penalty=0.1)


NAN, INF = math.nan, math.inf
WRONG = {
    "n": [0, 129, True, 1.0, "2"],
    "max_tokens": [0, -1, None, 2.5, 2**31],
    "min_tokens": [-1, 257, False],
    "temperature": [-0.1, NAN, INF, True, "hot", None, 101, 1e39],
    "top_p": [0, 0.0, 1.01, NAN, -1, True],
    "top_k": [-2, 1.5, True, 2**31],
    "min_p": [-0.1, 1.1, NAN],
    "repetition_penalty": [0, -1.0, NAN, INF, 1e-40, 1e39],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, NAN, "1"],
    "seed": [2**63, -(2**63) - 1, 1.0, True],
    "stop": ["", ["a", ""], [3], 5, {"a": 1}],
    "stop_token_ids": [[-1], [True], ["a"], 7],
    "ignore_eos": [1, None, "yes"],
    "logprobs": [-1, 21, True, 1.0],
    "logit_bias": [[1], {"a": 1.0}, {-1: 1.0}, {True: 1.0}, {1: 101.0}, {1: -101}, {1: NAN}],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_every_field_is_checked(name, value):
    with pytest.raises(UserError) as told:
        SamplingParams(**{name: value})
    items = value if isinstance(value, list) else [value]
    inner = [part for item in items if isinstance(item, dict) for part in (*item, *item.values())]
    assert str(told.value).startswith(name)
    assert any(str(part) in str(told.value) or part == "" for part in [*items, *inner])


def test_too_many_stops_and_unknown_tokens():
    with pytest.raises(UserError, match="stop with 17 strings: at most 16"):
        SamplingParams(stop=["x"] * 17)
    with pytest.raises(UserError, match=r"stop 'x.*x': strings of 1 to 1024 characters"):
        SamplingParams(stop=["x" * 1025])
    with pytest.raises(UserError, match="stop_token_ids with 1025 tokens: at most 1024"):
        SamplingParams(stop_token_ids=[1] * 1025)
    with pytest.raises(UserError, match="temperature that large: a number, 0 to 100"):
        SamplingParams(temperature=10**5000)
    with pytest.raises(UserError, match="stop_token_ids 50: this model's tokens are 0 to 49"):
        SamplingParams(stop_token_ids=[49, 50]).check_for(50, {0})
    with pytest.raises(UserError, match="logit_bias: token 50: this model's"):
        SamplingParams(logit_bias={50: 1.0}).check_for(50, {0})
    barred = SamplingParams(stop_token_ids=list(range(1, 50)), min_tokens=2)
    with pytest.raises(UserError, match="min_tokens 2: every token"):
        barred.check_for(50, {0})
    barred.check_for(51, {0})


HOTTEST = {
    "temperature": 100,
    "repetition_penalty": 100,
    "presence_penalty": 2,
    "seed": 5,
    "frequency_penalty": 2,
    "logit_bias": {3: 100, 4: -100},
}
COLDEST = {
    "temperature": 2e-5,
    "repetition_penalty": 0.01,
    "presence_penalty": -2,
    "top_p": 5e-324,
    "min_p": 5e-324,
    "seed": 5,
    "frequency_penalty": -2,
}


@pytest.mark.parametrize("asked", [HOTTEST, COLDEST], ids=["hottest", "coldest"])
def test_the_ends_of_every_range_stay_finite(asked):
    one = chooser(**asked, prompt=range(50))
    huge = torch.tensor([ROW]) * 1e30
    for _ in range(20):
        (chosen,) = choose_tokens(huge, [one])
        assert 0 <= chosen.token < 50
    heat, deepest, top_p = one.rule().view(np.float32)[[0, 1, 3]]
    assert 0 < heat < INF and deepest > 0 and 0 < top_p <= 1


def test_rules_differ_by_their_number_alone():
    one, same = (chooser(seed=3, temperature=0.5, top_k=7, top_p=0.9, min_p=0.25) for _ in "ab")
    first, second = one.rule(), one.rule()
    for rule in (first, second):
        assert rule.view(np.uint64)[2] == int(same.uniform() * 2**52)
        assert rule[[2, 6, 7]].tolist() == [7, 0, 0]
        wanted = np.array([2 * np.log2(np.e), 2, 0.9], np.float32)
        assert np.array_equal(rule.view(np.float32)[[0, 1, 3]], wanted)
    assert first.tolist() != second.tolist()  # the first is no view of what has changed
    assert not chooser(temperature=0.0).rule().any()


@pytest.mark.parametrize("place", ["_edit", "_draw", "logprobs_of"])
def test_a_row_that_fails_fails_alone(place, monkeypatch):
    """Whatever step of sampling it is: its neighbours get what they would have had without it."""
    asked = [
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 3, "presence_penalty": 1.0, "logprobs": 0},
        {"seed": 2, "logprobs": 3, "logit_bias": {7: 3}},
    ]
    logits = torch.tensor([ROW] * 4)
    wanted = [choose_tokens(logits[:1], [chooser(**one)])[0] for one in asked[:3]]
    logits[3, -1] = 5.5
    inner = getattr(sampling, place)

    def broken(x, *rest):
        if x[-1, -1] == 5.5:
            raise RuntimeError("this row")
        return inner(x, *rest)

    monkeypatch.setattr(sampling, place, broken)
    monkeypatch.setattr(sampling, "_parts", lambda rows, _: [(rows, rows)] if rows else [])
    choosers = [chooser(**one) for one in asked]
    *others, failed = choose_tokens(logits, choosers)
    assert others == wanted and isinstance(failed, RuntimeError)
    assert [one.drawn for one in choosers] == [1, 1, 1, 0]
