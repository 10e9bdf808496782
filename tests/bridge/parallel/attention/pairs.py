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


def allowed(segments, window=None):
    """The definition: a token sees the last tokens of its document, itself among them, as many as the window has.

    The document is what the segment continues, one segment behind another, and the segment up to the token.
    """
    found = set()
    for segment in segments:
        seen, prefix = [], segment.prefix
        while prefix is not None:
            seen = tokens([segments[prefix][:2]]) + seen
            prefix = segments[prefix].prefix
        for query in range(segment.start, segment.stop):
            document = [*seen, *range(segment.start, query + 1)]
            found |= {(query, key) for key in document[-(window or len(document)) :]}
    return found


def mask(segments, window=None):
    """The definition as a [T, T] mask."""
    total = segments[-1].stop
    found = torch.zeros(total, total, dtype=torch.bool)
    queries, keys = zip(*allowed(segments, window), strict=True)
    found[list(queries), list(keys)] = True
    return found


def computed(plan: RankPlan, rank, ranks, total):
    """How often a rank's plan computes each pair."""
    own = tokens(held(total, rank, ranks))
    found = Counter((own[q], own[k]) for a, b in plan.squares for q in range(a, b) for k in range(a, q + 1))

    def add(part, keys):
        for q0, q1, k0, k1 in part.rectangles:
            assert q0 < q1 and k0 < k1
            found.update((own[q], keys[k]) for q in range(q0, q1) for k in range(k0, k1))
        for q0, q1, k0, k1 in part.triangles:
            assert 0 < q1 - q0 == k1 - k0
            found.update((own[q0 + i], keys[k]) for i in range(q1 - q0) for k in range(k0 + i, k1))

    add(plan, own)
    for exchange in plan.exchanges:
        foreign = tokens(held(total, exchange.source, ranks))
        add(exchange, [foreign[row] for row in tokens(exchange.get)])
    return found


def all_computed(segments, ranks, plan=rank_plan, window=None):
    total = segments[-1].stop
    return sum((computed(plan(segments, rank, ranks, window), rank, ranks, total) for rank in range(ranks)), Counter())
