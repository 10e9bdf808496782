"""Attention as a set of (query, key) pairs: what segments mean and what plans compute."""

from collections import Counter

import torch
from hypothesis import strategies as st

from rl_bridge.parallel.attention.plan import RankPlan, held, rank_plan, segments_of


@st.composite
def segments(draw, ranks=1, prefixes=True):
    """Segments of a few tokens that 2 · ranks divides together; some continue an earlier one."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=9))
    multiple = 1 if ranks == 1 else 2 * ranks
    if sum(lengths) % multiple:
        lengths.append(-sum(lengths) % multiple)
    before = [draw(st.none() | st.integers(0, i - 1)) if i and prefixes else None for i in range(len(lengths))]
    return segments_of(lengths, before)


def tokens(spans):
    return [token for start, stop in spans for token in range(start, stop)]


def allowed(segments):
    """The definition: a token sees its own segment up to itself, and all of what the segment continues."""
    found = set()
    for segment in segments:
        seen, prefix = [], segment.prefix
        while prefix is not None:
            seen += tokens([segments[prefix][:2]])
            prefix = segments[prefix].prefix
        for query in range(segment.start, segment.stop):
            found |= {(query, key) for key in [*seen, *range(segment.start, query + 1)]}
    return found


def mask(segments):
    """The definition as a [T, T] mask."""
    total = segments[-1].stop
    found = torch.zeros(total, total, dtype=torch.bool)
    for start, stop, prefix in segments:
        found[start:stop, start:stop] = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        while prefix is not None:
            seen_start, seen_stop, prefix = segments[prefix]
            found[start:stop, seen_start:seen_stop] = True
    return found


def computed(plan: RankPlan, rank, ranks, total):
    """How often a rank's plan computes each pair."""
    own = tokens(held(total, rank, ranks))
    found = Counter((own[q], own[k]) for a, b in plan.squares for q in range(a, b) for k in range(a, q + 1))

    def add(rectangles, keys):
        for q0, q1, k0, k1 in rectangles:
            assert q0 < q1 and k0 < k1
            found.update((own[q], keys[k]) for q in range(q0, q1) for k in range(k0, k1))

    add(plan.rectangles, own)
    for exchange in plan.exchanges:
        foreign = tokens(held(total, exchange.source, ranks))
        add(exchange.rectangles, [foreign[row] for row in tokens(exchange.get)])
    return found


def all_computed(segments, ranks, plan=rank_plan):
    total = segments[-1].stop
    return sum((computed(plan(segments, rank, ranks), rank, ranks, total) for rank in range(ranks)), Counter())
