"""Attention as a set of (query, key) pairs: what segments mean, what plans compute, and plans that are wrong."""

import dataclasses
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


# Plans with a mistake: each must be seen.


def no_documents(segments, rank, ranks):
    return rank_plan(segments_of([segments[-1].stop]), rank, ranks)


def own_keys_alone(segments, rank, ranks):
    plan = rank_plan(segments, rank, ranks)
    exchanges = tuple(e._replace(rectangles=()) for e in plan.exchanges)
    return dataclasses.replace(plan, exchanges=exchanges)


def squares_alone(segments, rank, ranks):
    return dataclasses.replace(own_keys_alone(segments, rank, ranks), rectangles=())


def one_key_less(segments, rank, ranks):
    plan = rank_plan(segments, rank, ranks)

    def shorter(rectangles):
        return tuple(r._replace(k_start=r.k_start + 1) for r in rectangles if r.k_start + 1 < r.k_stop)

    exchanges = tuple(e._replace(rectangles=shorter(e.rectangles)) for e in plan.exchanges)
    return dataclasses.replace(plan, rectangles=shorter(plan.rectangles), exchanges=exchanges)


def shifted_documents(segments, rank, ranks):
    """Every document boundary one token late."""
    total = segments[-1].stop
    stops = [min(segment.stop + 1, total) for segment in segments]
    lengths = [b - a for a, b in zip([0, *stops], stops, strict=False)]
    return rank_plan(segments_of([length for length in lengths if length > 0]), rank, ranks)


BROKEN = [no_documents, own_keys_alone, squares_alone, one_key_less, shifted_documents]
