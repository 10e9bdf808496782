"""Laws of the block plan, on integers alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.parallel.attention.plan import Rectangle, held, pairs, rank_plan, segments_of
from rl_fn.packing import zigzag_split
from tests.bridge.parallel.attention import broken_plans
from tests.bridge.parallel.attention.broken_plans import WINDOWED
from tests.bridge.parallel.attention.pairs import all_computed, allowed, mask, segments, tokens

RANKS = st.integers(1, 5)


# ENG-16: without a window, with one that no document or each document is longer than, and with one token.
WINDOWS = st.none() | st.integers(1, 12)


@given(data=st.data(), ranks=RANKS, window=WINDOWS)
def test_every_allowed_pair_is_computed_once_and_no_other(data, ranks, window):
    cut = data.draw(segments(ranks))
    found = all_computed(cut, ranks, window=window)
    assert set(found) == allowed(cut, window)
    assert set(found.values()) == {1}
    # The mask by which attention is tested says the same.
    assert set(map(tuple, mask(cut, window).nonzero().tolist())) == allowed(cut, window)


@pytest.mark.parametrize("broken, window", [*((n, None) for n in broken_plans.NAMES), *((n, 4) for n in WINDOWED)])
def test_a_wrong_plan_breaks_the_law(broken, window):
    cut = segments_of([5, 11, 4, 4], [None, None, 1, None])
    found = all_computed(cut, 2, getattr(broken_plans, broken), window)
    assert set(found) != allowed(cut, window)


@given(data=st.data(), ranks=RANKS, window=WINDOWS)
def test_every_query_is_in_one_square_and_at_most_one_triangle(data, ranks, window):
    cut = data.draw(segments(ranks))
    for rank in range(ranks):
        plan = rank_plan(cut, rank, ranks, window)
        assert sorted(tokens(plan.squares)) == list(range(plan.tokens))
        assert all(start < stop for start, stop in plan.squares)
        queries = tokens((t.q_start, t.q_stop) for part in (plan, *plan.exchanges) for t in part.triangles)
        assert len(set(queries)) == len(queries)


@given(data=st.data(), ranks=RANKS)
def test_a_window_as_long_as_the_longest_document_changes_no_plan(data, ranks):
    cut = data.draw(segments(ranks))
    longest = max(sum(1 for q, _ in allowed(cut) if q == query) for query in range(cut[-1].stop))
    for rank in range(ranks):
        assert rank_plan(cut, rank, ranks, longest) == rank_plan(cut, rank, ranks)


@given(data=st.data(), ranks=st.integers(2, 5), window=WINDOWS)
def test_a_rank_gets_what_another_gives_and_nothing_else(data, ranks, window):
    cut = data.draw(segments(ranks))
    plans = [rank_plan(cut, rank, ranks, window) for rank in range(ranks)]
    for rank, plan in enumerate(plans):
        assert [e.source for e in plan.exchanges] == [(rank - step) % ranks for step in range(1, ranks)]
        for step, exchange in enumerate(plan.exchanges):
            other = plans[exchange.source].exchanges[step]
            assert (other.destination, other.give) == (rank, exchange.get)
            blocks = [*exchange.rectangles, *exchange.triangles]
            used = {k for block in blocks for k in range(block.k_start, block.k_stop)}
            assert used == set(range(len(tokens(exchange.get))))


@given(chunk=st.integers(1, 7), ranks=st.integers(1, 6))
def test_ranks_hold_what_zigzag_split_gives(chunk, ranks):
    total = 2 * ranks * chunk
    shards = zigzag_split(np.arange(total), ranks)
    assert [tokens(held(total, rank, ranks)) for rank in range(ranks)] == shards.tolist()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_long_document_is_as_much_work_on_every_rank(ranks):
    total = 4096
    work = [rank_plan(segments_of([total]), rank, ranks).pairs() for rank in range(ranks)]
    assert sum(work) == total * (total + 1) // 2
    assert max(work) <= 1.01 * min(work)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_long_document_is_few_blocks(ranks):
    for rank in range(ranks):
        plan = rank_plan(segments_of([4096]), rank, ranks)
        assert len(plan.squares) + len(plan.rectangles) <= 3
        assert all(len(exchange.rectangles) == 1 for exchange in plan.exchanges)


def test_short_documents_exchange_nothing_where_no_chunk_cuts_them():
    plans = [rank_plan(segments_of([8] * 16), rank, 4) for rank in range(4)]
    assert all(not e.get and not e.give and not e.rectangles for plan in plans for e in plan.exchanges)


def test_the_completions_of_a_prompt_share_one_rectangle():
    plan = rank_plan(segments_of([10, 3, 4, 5, 6, 2], [None, 0, 0, 0, None, 4]), 0, 1)
    assert plan.rectangles == (Rectangle(10, 22, 0, 10), Rectangle(28, 30, 22, 28))
    assert plan.pairs() == sum(map(pairs, plan.squares)) + 120 + 12


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_window_is_less_work_and_fewer_keys_from_others(ranks):
    total, window = 4096, 64
    plans = [rank_plan(segments_of([total]), rank, ranks, window) for rank in range(ranks)]
    assert sum(plan.pairs() for plan in plans) == total * window - window * (window - 1) // 2
    # A rank has two chunks: it asks for the window before each.
    assert all(len(tokens(span for e in plan.exchanges for span in e.get)) <= 2 * (window - 1) for plan in plans)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: segments_of([3, 0]), r"at least one token, got lengths\[1\] = 0"),
        (lambda: segments_of([3, 2], [None, 1]), r"continues an earlier one, got prefixes\[1\] = 1"),
        (lambda: rank_plan((), 0, 1), "at least one segment"),
        (lambda: rank_plan(segments_of([6]), 0, 1, 0), "a window is at least 1, got 0"),
        (lambda: rank_plan(segments_of([6]), 0, 2), "2 · 2 ranks to divide the tokens, got 6"),
    ],
)
def test_what_is_no_plan_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_completions_of_every_prompt_become_one_rectangle():
    """Not of the first prompt alone: two completions each, of three prompts."""
    plan = rank_plan(segments_of([4, 2, 2, 4, 3, 3, 4, 2, 2], [None, 0, 0, None, 3, 3, None, 6, 6]), 0, 1)
    assert list(plan.rectangles) == [Rectangle(4, 8, 0, 4), Rectangle(12, 18, 8, 12), Rectangle(22, 26, 18, 22)]
