"""Which queries attend to which keys, as integers: no mask is ever made, and every rank computes the same plan.

A packed sequence is a row of segments. A token attends to the earlier tokens of its own segment and to the whole of the
segments that its segment continues (a completion continues its prompt, which several completions may share). Cut over
the ranks of a sequence-parallel group this is always a set of causal squares, one for each stretch of a segment that a
rank holds, and of full rectangles.
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Segment(NamedTuple):
    """Tokens start … stop of the packed sequence; ``prefix`` is the number of the segment that this one continues."""

    start: int
    stop: int
    prefix: int | None = None


class Span(NamedTuple):
    """Rows start … stop of one rank's tensors, or tokens start … stop of the whole sequence."""

    start: int
    stop: int


class Rectangle(NamedTuple):
    """Queries q_start … q_stop attend to all of the keys k_start … k_stop."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


class Exchange(NamedTuple):
    """One step of the ring: keys that a rank gets from another, and keys of its own that it gives to a third.

    ``get`` are spans of the source's rows and ``give`` spans of the rank's own; either can be empty. The rectangles
    count keys in the order in which they arrive.
    """

    source: int
    get: tuple[Span, ...]
    rectangles: tuple[Rectangle, ...]
    destination: int
    give: tuple[Span, ...]


@dataclass(frozen=True)
class RankPlan:
    """The blocks that one rank computes. Every query lies in exactly one square."""

    tokens: int
    squares: tuple[Span, ...]
    rectangles: tuple[Rectangle, ...]
    exchanges: tuple[Exchange, ...]

    def pairs(self) -> int:
        """The number of (query, key) pairs: the work, up to a constant."""
        rectangles = [*self.rectangles, *(r for exchange in self.exchanges for r in exchange.rectangles)]
        return sum(pairs(square) for square in self.squares) + sum(map(pairs, rectangles))


def pairs(block: Span | Rectangle) -> int:
    """The number of (query, key) pairs of a causal square or a rectangle.

    >>> pairs(Span(2, 5)), pairs(Rectangle(0, 2, 0, 4))
    (6, 8)
    """
    if isinstance(block, Span):
        length = block.stop - block.start
        return length * (length + 1) // 2
    return (block.q_stop - block.q_start) * (block.k_stop - block.k_start)


def segments_of(lengths: Iterable[int], prefixes: Sequence[int | None] | None = None) -> tuple[Segment, ...]:
    """Segments of these lengths, one after another; prefixes[i] is the number of the earlier segment that i continues.

    >>> segments_of([2, 3])
    (Segment(start=0, stop=2, prefix=None), Segment(start=2, stop=5, prefix=None))
    """
    lengths = list(lengths)
    found, start = [], 0
    for number, length in enumerate(lengths):
        prefix = None if prefixes is None else prefixes[number]
        if length < 1:
            raise ValueError(f"a segment has at least one token, got lengths[{number}] = {length}")
        if prefix is not None and not 0 <= prefix < number:
            raise ValueError(f"a segment continues an earlier one, got prefixes[{number}] = {prefix}")
        found.append(Segment(start, start + length, prefix))
        start += length
    return tuple(found)


def held(total: int, rank: int, ranks: int) -> tuple[Span, ...]:
    """The spans of the whole sequence that a rank holds, in the order of its rows: zigzag.

    The sequence is cut into 2 · ranks chunks; a rank has one early and one late, so that causal attention costs all
    ranks the same. Where the two are neighbours, they are one span.

    >>> held(8, 0, 2), held(8, 1, 2)
    ((Span(start=0, stop=2), Span(start=6, stop=8)), (Span(start=2, stop=6),))
    """
    if ranks == 1:
        return (Span(0, total),)
    if total % (2 * ranks):
        raise ValueError(f"zigzag needs 2 · {ranks} ranks to divide the tokens, got {total}")
    size = total // (2 * ranks)
    early, late = rank * size, (2 * ranks - 1 - rank) * size
    if early + size == late:
        return (Span(early, late + size),)
    return (Span(early, early + size), Span(late, late + size))


def _common(a: Span | Segment, b: Span) -> Span | None:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return Span(start, stop) if start < stop else None


def _rows(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Each span with what takes a token's number to the number of its row."""
    offsets, row = [], 0
    for span in spans:
        offsets.append((span, row - span.start))
        row += span.stop - span.start
    return offsets


def _ancestors(segments: Sequence[Segment], segment: Segment) -> list[Segment]:
    found = []
    while segment.prefix is not None:
        segment = segments[segment.prefix]
        found.append(segment)
    return found


def _merged(rectangles: list[Rectangle]) -> tuple[Rectangle, ...]:
    """The same pairs in fewer rectangles: neighbours with the same keys, then neighbours with the same queries.

    All completions of a prompt become one rectangle, and so do the chunks of one long document.
    """
    by_keys: list[Rectangle] = []
    for r in sorted(rectangles, key=lambda r: (r.k_start, r.k_stop, r.q_start)):
        last = by_keys[-1] if by_keys else None
        if last and (last.k_start, last.k_stop, last.q_stop) == (r.k_start, r.k_stop, r.q_start):
            by_keys[-1] = last._replace(q_stop=r.q_stop)
        else:
            by_keys.append(r)
    merged: list[Rectangle] = []
    for r in sorted(by_keys):
        last = merged[-1] if merged else None
        if last and (last.q_start, last.q_stop, last.k_stop) == (r.q_start, r.q_stop, r.k_start):
            merged[-1] = last._replace(k_stop=r.k_stop)
        else:
            merged.append(r)
    return tuple(merged)


def _blocks(
    segments: Sequence[Segment], queries: Sequence[Span], keys: Sequence[Span]
) -> tuple[tuple[Span, ...], tuple[Rectangle, ...]]:
    """Squares and rectangles of the queries in some spans with the keys in others, as row numbers of both."""
    squares, rectangles = [], []
    starts = [segment.start for segment in segments]
    key_rows = _rows(keys)
    for q_span, q_offset in _rows(queries):
        first, end = bisect.bisect_right(starts, q_span.start) - 1, bisect.bisect_left(starts, q_span.stop)
        for segment in segments[first:end]:
            q = _common(segment, q_span)
            assert q is not None
            if q_span in keys:
                squares.append(Span(q.start + q_offset, q.stop + q_offset))
            before = [(segment, k_row) for k_row in key_rows if k_row[0].stop <= q_span.start]
            shared = [(ancestor, k_row) for ancestor in _ancestors(segments, segment) for k_row in key_rows]
            for attended, (k_span, k_offset) in [*before, *shared]:
                k = _common(attended, k_span)
                if k is not None:
                    rows = (q.start + q_offset, q.stop + q_offset, k.start + k_offset, k.stop + k_offset)
                    rectangles.append(Rectangle(*rows))
    return tuple(squares), _merged(rectangles)


def _needed(rectangles: Iterable[Rectangle]) -> tuple[Span, ...]:
    """The keys of some rectangles: disjoint spans, ascending."""
    spans: list[Span] = []
    for start, stop in sorted((r.k_start, r.k_stop) for r in rectangles):
        if spans and start <= spans[-1].stop:
            spans[-1] = Span(spans[-1].start, max(stop, spans[-1].stop))
        else:
            spans.append(Span(start, stop))
    return tuple(spans)


def _arrived(rectangle: Rectangle, needed: Sequence[Span]) -> Rectangle:
    """The rectangle with its keys counted in the order in which the needed spans arrive."""
    span, offset = next((s, o) for s, o in _rows(needed) if s.start <= rectangle.k_start < s.stop)
    assert rectangle.k_stop <= span.stop
    return rectangle._replace(k_start=rectangle.k_start + offset, k_stop=rectangle.k_stop + offset)


def rank_plan(segments: Sequence[Segment], rank: int, ranks: int) -> RankPlan:
    """What one rank of a sequence-parallel group computes, and the keys that it gets and gives for that.

    Segments follow one another and fill the sequence, whose length 2 · ranks divides (on one rank, any length). At
    step s a rank gets keys from rank − s, and only those that its queries attend to.

    >>> rank_plan(segments_of([3, 5]), 0, 2).squares
    (Span(start=0, stop=2), Span(start=2, stop=4))
    >>> rank_plan(segments_of([3, 5]), 0, 2).exchanges[0].rectangles
    (Rectangle(q_start=2, q_stop=4, k_start=0, k_stop=3),)
    """
    if not segments:
        raise ValueError("a plan needs at least one segment: padding is a segment of its own")
    total = segments[-1].stop
    spans = [held(total, other, ranks) for other in range(ranks)]
    squares, rectangles = _blocks(segments, spans[rank], spans[rank])
    exchanges = []
    for step in range(1, ranks):
        source, destination = (rank - step) % ranks, (rank + step) % ranks
        found = _blocks(segments, spans[rank], spans[source])[1]
        get, give = _needed(found), _needed(_blocks(segments, spans[destination], spans[rank])[1])
        arrived = tuple(_arrived(rectangle, get) for rectangle in found)
        exchanges.append(Exchange(source, get, arrived, destination, give))
    return RankPlan(sum(s.stop - s.start for s in spans[rank]), squares, rectangles, tuple(exchanges))
