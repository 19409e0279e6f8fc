"""Pages: holds are counted, prefixes are found by content, and the oldest give way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billfish.engine.kv.pages import Pages


def written(pages, tokens, salt=0):
    """As a sequence does that computes these tokens: take, fill, remember."""
    held = pages.take(-(-len(tokens) // pages.tokens))
    pages.remember(tokens, held, salt)
    return held


def test_taken_pages_are_different_and_counted():
    pages = Pages(5, 4)
    assert (pages.free(), pages.used()) == (5, 0)
    taken = pages.take(2) + pages.take(3)
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert (pages.free(), pages.used()) == (0, 5)
    pages.release(taken[:2])
    assert (pages.free(), pages.used()) == (2, 3)
    assert sorted(pages.take(2)) == sorted(taken[:2])


def test_too_many_changes_nothing():
    pages = Pages(3, 4)
    written(pages, range(4))
    assert pages.take(3) is None
    assert (pages.free(), pages.used()) == (2, 1)
    assert pages.take(0) == []


@pytest.mark.parametrize(("count", "tokens"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_of_nothing_is_refused(count, tokens):
    with pytest.raises(ValueError, match="at least 1"):
        Pages(count, tokens)


def test_whole_pages_of_a_prefix_are_found_and_held_once_more():
    pages = Pages(8, 4)
    held = written(pages, range(10))  # two full pages and a half one
    assert pages.find([*range(9), 99]) == held[:2]
    assert pages.find([*range(7), 99, 8, 9]) == held[:1]
    assert pages.find([99, *range(1, 10)]) == []
    assert pages.used() == 3
    pages.release(held)
    assert pages.used() == 2, "the two finders still hold"
    pages.release(held[:2])
    pages.release(held[:1])
    assert pages.used() == 0


@pytest.mark.parametrize(("length", "found"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_one_token_is_always_left_to_compute(length, found):
    pages = Pages(8, 4)
    held = written(pages, range(12))
    assert pages.find(range(length)) == held[:found]


def test_content_is_found_only_behind_its_own_prefix():
    pages = Pages(8, 2)
    written(pages, [1, 2, 3, 4])
    assert pages.find([3, 4, 5]) == [], "the same tokens at another place are other K and V"
    assert pages.find([9, 9, 3, 4, 5]) == []


def test_salts_do_not_share():
    pages = Pages(8, 2)
    mine, yours = written(pages, [1, 2, 3], salt=1), written(pages, [1, 2, 3], salt=-2)
    assert pages.find([1, 2, 3], salt=1) == mine[:1]
    assert pages.find([1, 2, 3], salt=-2) == yours[:1]
    assert pages.find([1, 2, 3]) == []


def test_neighbouring_tokens_do_not_run_together():
    pages = Pages(8, 2)
    written(pages, [1, 23])
    for other in ([12, 3], [123, 0], [23, 1], [1 + 2**32, 23], [-1, 23]):
        assert pages.find([*other, 5]) == []


def test_released_pages_stay_findable_until_they_are_taken():
    pages = Pages(3, 2)
    held = written(pages, [1, 2, 3, 4])
    pages.release(held)
    assert (pages.free(), pages.used()) == (3, 0)
    assert pages.find([1, 2, 3, 4, 5]) == held
    assert pages.used() == 2
    pages.release(held)
    pages.take(3)
    assert pages.find([1, 2, 3, 4, 5]) == []


def test_empty_pages_go_first_then_the_least_recently_used():
    pages = Pages(4, 2)
    old, new = written(pages, [1, 2]), written(pages, [3, 4])
    pages.release(old)
    pages.release(new)
    pages.release(pages.find([1, 2, 0]))  # used again: now `new` is the oldest
    empty = pages.take(2)
    assert not set(empty) & {*old, *new}
    assert pages.take(1) == new
    assert pages.find([3, 4, 0]) == []
    assert pages.find([1, 2, 0]) == old
    assert pages.take(1) is None


def test_the_end_of_a_text_gives_way_before_its_beginning():
    pages = Pages(3, 2)
    held = written(pages, range(6))
    pages.release(held)
    assert pages.take(1) == [held[2]]
    assert pages.find(range(7)) == held[:2]


def test_remembering_twice_changes_nothing():
    pages = Pages(4, 2)
    held = written(pages, range(4))
    pages.remember(range(4), held)
    assert pages.find(range(5)) == held
    pages.release(held)
    pages.release(held)
    assert (pages.free(), pages.used()) == (4, 0)


def test_a_growing_text_is_remembered_piece_by_piece():
    pages = Pages(4, 2)
    held = pages.take(3)
    pages.remember([1, 2], held[:1])
    pages.remember([3, 4, 5, 6], held[1:], after=held[0])
    assert pages.find([1, 2, 3, 4, 5, 6, 7]) == held
    other = pages.take(1)
    with pytest.raises(AssertionError, match="never remembered"):
        pages.remember([7, 8], other, after=other[0])


def test_the_first_page_of_a_content_keeps_it():
    pages = Pages(6, 2)
    first, second = written(pages, [1, 2]), written(pages, [1, 2, 3, 4])
    assert pages.find([1, 2, 3, 4, 5]) == [first[0], second[1]]
    pages.release(first + second[1:])
    pages.release(second)
    assert pages.find([1, 2, 0]) == first, "second's own copy is empty now"
    assert pages.free() == 5


def test_a_copy_takes_over_when_the_first_is_gone():
    pages = Pages(2, 2)
    first, second = written(pages, [1, 2]), written(pages, [1, 2])
    pages.release(first)
    assert pages.take(1) == first
    assert pages.find([1, 2, 0]) == []
    pages.release(second)
    assert pages.find([1, 2, 0]) == second


def test_without_caching_nothing_is_found():
    pages = Pages(4, 2, caching=False)
    held = written(pages, range(4))
    assert pages.find(range(5)) == []
    pages.release(held)
    assert pages.find(range(5)) == []
    assert pages.free() == 4


def test_wrong_use_is_told():
    pages = Pages(4, 2)
    held = written(pages, [1, 2])
    with pytest.raises(AssertionError, match="written to when full"):
        pages.remember([1, 3], held)
    pages.release(held)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pages.release(held)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pages.remember([1, 2], held)


@given(st.randoms(use_true_random=False), st.integers(1, 9), st.integers(1, 3), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_use_agrees_with_a_model_of_contents(random, count, size, caching):
    """Holders come and go; a model knows what was written where. Whatever is found is right."""
    pages = Pages(count, size, caching)
    content, holders = {}, []
    for _ in range(60):
        if holders and random.random() < 0.45:
            pages.release(holders.pop(random.randrange(len(holders))))
        else:
            text = [random.randrange(2) for _ in range(random.randrange(1, 4 * size))]
            salt = random.randrange(2)
            found = pages.find(text, salt)
            assert len(found) * size < len(text)
            assert caching or not found
            for number, page in enumerate(found):
                assert content[page] == (salt, text[: (number + 1) * size])
            held_before = {page for held in holders for page in held}
            more = pages.take(-(-len(text) // size) - len(found))
            if more is None:
                pages.release(found)
            else:
                assert not {*more} & {*found, *held_before}, "somebody else's page"
                held = found + more
                for number, page in enumerate(held):
                    content[page] = (salt, text[: (number + 1) * size])
                pages.remember(text, held, salt)
                holders.append(held)
        held = {page for held in holders for page in held}
        assert (pages.used(), pages.free()) == (len(held), count - len(held))
    for held in holders:
        pages.release(held)
    assert pages.free() == count
    assert sorted(pages.take(count)) == list(range(count))
