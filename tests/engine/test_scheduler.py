"""Scheduler: each rule by an example."""

import pytest

from billfish.engine.kv.pages import Pages
from billfish.engine.scheduler import Scheduler, Sequence


def scheduler(count=16, tokens=4, budget=8, most=4, caching=True):
    return Scheduler(Pages(count, tokens, caching), budget, most)


def text(name, length, most=40, first=None):
    """A prompt that shares no page with that of another name, unless `first` says so."""
    return Sequence(name, [ord(name[0]) if first is None else first] * length, most)


def told(pieces):
    return [(piece.sequence.name, piece.start, piece.count, piece.samples) for piece in pieces]


def turn(plan, pieces=None):
    """One step of an engine that writes token 7."""
    pieces = plan.step() if pieces is None else pieces
    plan.ran(pieces)
    for piece in pieces:
        if piece.samples:
            piece.sequence.output.append(7)
    return told(pieces)


def names(sequences):
    return [sequence.name for sequence in sequences]


def test_a_sequence_knows_its_tokens():
    one = Sequence("a", [1, 2, 3], 9, output=[4, 5])
    assert one.tokens == [1, 2, 3, 4, 5] and len(one) == 5
    for start in range(6):
        for stop in range(start, 6):
            assert one.part(start, stop) == one.tokens[start:stop]
    assert one != Sequence("a", [1, 2, 3], 9, output=[4, 5]), "identity, not content"


def test_a_prompt_runs_then_one_token_a_step():
    plan = scheduler()
    one = text("a", 5)
    plan.add(one)
    assert turn(plan) == [("a", 0, 5, True)]
    assert turn(plan) == [("a", 5, 1, True)]
    assert turn(plan) == [("a", 6, 1, True)]
    assert (one.computed, len(one), len(one.pages)) == (7, 8, 2)
    plan.finish(one)
    assert (plan.running, plan.waiting, plan.pages.used()) == ((), (), 0)
    assert plan.step() == []


def test_a_long_prompt_is_cut_by_the_budget():
    plan = scheduler(budget=8)
    plan.add(text("a", 20))
    assert turn(plan) == [("a", 0, 8, False)]
    assert turn(plan) == [("a", 8, 8, False)]
    assert len(plan.running[0].pages) == 4, "pages are taken as they are needed"
    assert turn(plan) == [("a", 16, 4, True)]


def test_decodes_first_then_the_prefill_then_the_waiting():
    plan = scheduler(budget=8)
    plan.add(text("a", 3))
    turn(plan)
    plan.add(text("b", 9))
    plan.add(text("c", 6))
    assert turn(plan) == [("a", 3, 1, True), ("b", 0, 7, False)]
    assert turn(plan) == [("a", 4, 1, True), ("b", 7, 2, True), ("c", 0, 5, False)]
    assert turn(plan) == [("a", 5, 1, True), ("b", 9, 1, True), ("c", 5, 1, True)]


def test_decodes_come_first_even_behind_an_older_one_with_more_to_go():
    plan = scheduler(budget=4)
    first, second = text("a", 2), text("b", 2)
    plan.add(first)
    plan.add(second)
    turn(plan)
    first.output += [7] * 4  # as if tokens had been forced upon it
    assert turn(plan) == [("b", 2, 1, True), ("a", 2, 3, False)]


def test_never_more_than_most_sequences():
    plan = scheduler(most=2)
    for name in "abc":
        plan.add(text(name, 2))
    turn(plan)
    assert (names(plan.running), names(plan.waiting)) == (["a", "b"], ["c"])
    plan.finish(plan.running[0])
    turn(plan)
    assert (names(plan.running), names(plan.waiting)) == (["b", "c"], [])


def test_nobody_overtakes_one_that_does_not_fit():
    plan = scheduler(count=5, budget=20)
    plan.add(text("a", 8, most=12))
    turn(plan)
    plan.add(text("b", 16, most=16))
    plan.add(text("c", 1, most=4))
    for _ in range(3):
        turn(plan)
        assert (names(plan.running), names(plan.waiting)) == (["a"], ["b", "c"])
    plan.finish(plan.running[0])
    assert turn(plan) == [("b", 0, 16, False), ("c", 0, 1, True)]


def test_a_prompt_is_admitted_only_if_all_of_it_fits():
    plan = scheduler(count=5, budget=9)
    plan.add(text("a", 12, most=12))
    plan.add(text("b", 12, most=12))
    turn(plan)
    assert turn(plan) == [("a", 9, 3, False)], "two pages are free; b needs three"
    plan.finish(plan.running[0])
    assert turn(plan) == [("b", 0, 9, False)]


def test_what_can_never_run_is_refused():
    plan = scheduler(count=4, tokens=4)
    with pytest.raises(ValueError, match=r"17 tokens need 5 pages of 4, and there are 4"):
        plan.add(text("a", 3, most=17))
    with pytest.raises(ValueError, match="empty"):
        plan.add(text("a", 0))
    with pytest.raises(ValueError, match="has 5 tokens and may have 4"):
        plan.add(text("a", 5, most=4))
    plan.add(text("a", 3, most=16))
    with pytest.raises(ValueError, match="of that name"):
        plan.add(text("a", 3, most=16))
    turn(plan)
    with pytest.raises(ValueError, match="of that name"):
        plan.add(text("a", 3, most=16))
    for budget, most in ((3, 4), (4, 0)):
        with pytest.raises(ValueError, match="a token for each"):
            Scheduler(plan.pages, budget, most)


def test_pages_that_others_hold_from_the_start_are_not_counted_on():
    pages = Pages(4, 4)
    pages.take(1)
    with pytest.raises(ValueError, match="need 4 pages of 4, and there are 3"):
        Scheduler(pages, 8, 4).add(text("a", 3, most=16))


def test_a_text_with_all_it_may_have_is_computed_but_not_continued():
    plan = scheduler()
    scored, full = text("a", 4, most=4), text("b", 2, most=3)
    plan.add(scored)
    plan.add(full)
    assert turn(plan) == [("a", 0, 4, False), ("b", 0, 2, True)]
    assert turn(plan) == [("b", 2, 1, False)]
    assert plan.step() == []
    full.output.append(7)
    with pytest.raises(AssertionError, match="b has 4 tokens"):
        plan.step()


def test_the_last_to_arrive_is_preempted_and_comes_back_first():
    plan = scheduler(count=3, caching=False)
    first, last = text("a", 4, most=12), text("b", 3, most=12)
    plan.add(first)
    plan.add(last)
    turn(plan)
    plan.add(text("c", 1, most=4))
    assert turn(plan) == [("a", 4, 1, True), ("b", 3, 1, True)], "a has two pages now, b one"
    for _ in range(3):
        turn(plan)
        if last.preempted:
            break
    assert (names(plan.running), names(plan.waiting)) == (["a"], ["b", "c"])
    assert (last.preempted, last.pages, last.computed, last.cached) == (1, [], 0, 0)
    assert last.output == [7, 7], "what it has written is kept"
    plan.finish(first)
    assert turn(plan) == [("b", 0, 5, True), ("c", 0, 1, True)]


def test_the_preempted_keep_the_order_of_their_arrival():
    plan = scheduler(count=4, tokens=2, most=3, caching=False)
    for name in "abc":
        plan.add(text(name, 1, most=8))
    turn(plan)
    plan.add(text("d", 1, most=8))
    plan.add(text("e", 1, most=8))
    oldest = plan.running[0]
    while len(plan.running) > 1:
        turn(plan)
        assert plan.running[0] is oldest and not oldest.preempted
        assert names(plan.running + plan.waiting) == [*"abcde"]
    assert [one.preempted for one in plan.waiting] == [1, 1, 0, 0]


def test_a_sequence_that_is_itself_the_last_gives_way():
    plan = scheduler(count=4, tokens=2, budget=4, caching=False)
    plan.add(text("a", 3, most=8))
    turn(plan)
    plan.add(text("b", 2, most=8))
    turn(plan)
    turn(plan)  # a takes the fourth page, b wants a fifth
    assert told(plan.step()) == [("a", 5, 1, True)]
    assert (names(plan.running), plan.waiting[0].preempted) == (["a"], 1)


def test_a_planned_token_is_taken_back_when_its_pages_are():
    plan = scheduler(count=4, tokens=2, budget=8, caching=False)
    first, second = text("a", 2, most=8), text("b", 3, most=4)
    plan.add(first)
    plan.add(second)
    turn(plan)
    first.output += [7] * 3
    assert turn(plan) == [("a", 2, 4, True)], "b's token was planned first, then its pages went"
    assert names(plan.waiting) == ["b"]
    assert plan.pages.used() == 3


def test_a_shared_prefix_is_computed_once():
    plan = scheduler(budget=16)
    first = text("a", 9, first=1)
    plan.add(first)
    turn(plan)
    second = text("b", 11, first=1)
    plan.add(second)
    assert turn(plan) == [("a", 9, 1, True), ("b", 8, 3, True)]
    assert (first.cached, second.cached) == (0, 8)
    assert second.pages[:2] == first.pages[:2] and second.pages[2] != first.pages[2]
    assert plan.pages.used() == 4
    plan.finish(first)
    assert plan.pages.used() == 3
    third = text("c", 9, first=1)
    third.salt = 5
    plan.add(third)
    turn(plan)
    assert third.cached == 0, "another salt"


def test_what_a_sequence_wrote_is_found_by_the_next_turn_of_the_talk():
    plan = scheduler()
    one = text("a", 3)
    plan.add(one)
    for _ in range(7):
        turn(plan)
    plan.finish(one)
    plan.add(Sequence("b", [*one.tokens, 1, 2], 40))
    assert turn(plan) == [("b", 8, 4, True)]


def test_a_preempted_sequence_finds_its_own_pages_again():
    plan = scheduler(count=4, tokens=2, budget=8)
    first, last = text("a", 1, most=8), text("b", 1, most=8)
    plan.add(first)
    plan.add(last)
    while not last.preempted:
        turn(plan)
    assert (len(last), len(first.pages)) == (5, 3)
    assert plan.cancel("a")
    assert turn(plan) == [("b", 2, 3, True)], "one page is there; it is of what b wrote itself"
    assert last.cached == 0, "this speaks of the first admission"


def test_one_that_waits_is_looked_at_again_when_its_prefix_becomes_known():
    plan = scheduler(count=5, budget=4)
    plan.add(text("a", 12, most=16, first=1))
    plan.add(text("b", 13, most=16, first=1))
    turn(plan)
    turn(plan)
    assert names(plan.waiting) == ["b"], "four pages for b, and one for the rest of a, of five"
    turn(plan)
    assert turn(plan) == [("a", 12, 1, True), ("b", 12, 1, True)]


def test_one_that_waits_in_vain_is_not_looked_up_in_every_step(monkeypatch):
    plan = scheduler(count=4, budget=16)
    plan.add(text("a", 9, most=16))
    plan.add(text("b", 9, most=16))
    turn(plan)
    looked, find = [], plan.pages.find
    monkeypatch.setattr(plan.pages, "find", lambda *a: looked.append(a) or find(*a))
    for _ in range(5):
        turn(plan)
    assert len(looked) == 1, "once after the prompt of a had run, then only decodes"
    plan.cancel("a")
    turn(plan)
    assert len(looked) == 2 and names(plan.running) == ["b"]


def test_cancel_frees_at_once_wherever_the_sequence_is():
    plan = scheduler(most=1)
    plan.add(text("a", 5))
    plan.add(text("b", 5))
    turn(plan)
    assert plan.cancel("b") and plan.waiting == ()
    assert plan.cancel("a") and plan.running == () and plan.pages.used() == 0
    assert not plan.cancel("a") and not plan.cancel("z")


def test_one_that_leaves_while_it_runs_is_passed_over():
    plan = scheduler()
    gone, done, stays = text("a", 4), text("b", 2), text("c", 2)
    for one in (gone, done, stays):
        plan.add(one)
    pieces = plan.step()
    table = gone.pages
    assert plan.cancel("a")
    plan.finish(done)
    plan.finish(done)
    again = text("a", 4)
    plan.add(again)  # the same name, another sequence
    plan.ran(pieces)
    assert (gone.computed, gone.pages, done.computed, stays.computed) == (0, [], 0, 2)
    assert len(table) == 1, "the table of the step under way is left as it was"
    assert again.computed == 0
    plan.finish(gone)  # not that one
    assert names(plan.running + plan.waiting) == ["c", "a"]
    stays.output.append(7)
    turn(plan)
    assert again.cached == 0, "what was cancelled was not remembered"
    assert plan.pages.used() == 2


def test_to_run_a_step_twice_is_an_error():
    plan = scheduler()
    plan.add(text("a", 4))
    pieces = plan.step()
    plan.ran(pieces)
    with pytest.raises(AssertionError):
        plan.ran(pieces)


def test_sequences_can_grow_while_pages_have_room():
    plan = scheduler(count=3, tokens=4)
    both = text("a", 3, most=9), text("b", 3, most=9)
    for one in both:
        plan.add(one)
    turn(plan)  # four tokens each, a page each, one page free
    assert not plan.can_grow()
    both[1].output.clear()
    assert plan.can_grow()  # the last token of its page
