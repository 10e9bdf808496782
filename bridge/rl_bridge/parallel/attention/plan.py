"""Which queries attend to which keys, as integers: no mask is ever made, and every rank computes the same plan.

A packed sequence is a row of segments. A token attends to the earlier tokens of its own segment and to the whole of the
segments that its segment continues (a completion continues its prompt, which several completions may share). Cut over
the ranks of a sequence-parallel group this is always a set of causal squares, one for each stretch of a segment that a
rank holds, and of full rectangles. With a sliding window a token attends to the last ``window`` tokens of these, itself
among them. That is a set of smaller squares and rectangles, and of triangles, which are causal squares read backwards.
"""

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar


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


class Triangle(NamedTuple):
    """A corner of pairs: as many queries as keys; query number i attends to keys from number i on."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


_Block = TypeVar("_Block", Rectangle, Triangle)


class Exchange(NamedTuple):
    """One step of the ring: keys that a rank gets from another, and keys of its own that it gives to a third.

    ``get`` are spans of the source's rows and ``give`` spans of the rank's own; either can be empty. The rectangles and
    triangles count keys in the order in which they arrive.
    """

    source: int
    get: tuple[Span, ...]
    rectangles: tuple[Rectangle, ...]
    destination: int
    give: tuple[Span, ...]
    triangles: tuple[Triangle, ...] = ()


@dataclass(frozen=True)
class RankPlan:
    """The blocks that one rank computes. Every query lies in exactly one square and in at most one triangle."""

    tokens: int
    squares: tuple[Span, ...]
    rectangles: tuple[Rectangle, ...]
    exchanges: tuple[Exchange, ...]
    triangles: tuple[Triangle, ...] = ()

    def pairs(self) -> int:
        """The number of (query, key) pairs: the work, up to a constant."""
        others = [blocks for part in (self, *self.exchanges) for blocks in (*part.rectangles, *part.triangles)]
        return sum(pairs(block) for block in (*self.squares, *others))


def pairs(block: Span | Rectangle | Triangle) -> int:
    """The number of (query, key) pairs of a causal square, a rectangle or a triangle.

    >>> pairs(Span(2, 5)), pairs(Rectangle(0, 2, 0, 4)), pairs(Triangle(4, 6, 0, 2))
    (6, 8, 3)
    """
    if isinstance(block, Rectangle):
        return (block.q_stop - block.q_start) * (block.k_stop - block.k_start)
    length = block.stop - block.start if isinstance(block, Span) else block.q_stop - block.q_start
    return length * (length + 1) // 2


def segments_of(lengths: Iterable[int], prefixes: Sequence[int | None] | None = None) -> tuple[Segment, ...]:
    """Segments of these lengths, one after another; prefixes[i] is the number of the earlier segment that i continues.

    >>> segments_of([2, 3])
    (Segment(start=0, stop=2, prefix=None), Segment(start=2, stop=5, prefix=None))
    """
    lengths = list(lengths)
    segments, start = [], 0
    for number, length in enumerate(lengths):
        prefix = None if prefixes is None else prefixes[number]
        if length < 1:
            raise ValueError(f"a segment has at least one token, got lengths[{number}] = {length}")
        if prefix is not None and not 0 <= prefix < number:
            raise ValueError(f"a segment continues an earlier one, got prefixes[{number}] = {prefix}")
        segments.append(Segment(start, start + length, prefix))
        start += length
    return tuple(segments)


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
    ancestors = []
    while segment.prefix is not None:
        segment = segments[segment.prefix]
        ancestors.append(segment)
    return ancestors


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


def _within(q: Span, k: Span, distance: int, window: int | None) -> tuple[list[Rectangle], list[Triangle]]:
    """Blocks that queries of a window have with keys before them; ``distance`` is that of q.start from k.start.

    The first queries see all of the keys. Each of the next sees one key less than the query before it, and the last
    queries see none.

    >>> _within(Span(4, 10), Span(0, 4), 4, 6)
    ([Rectangle(q_start=4, q_stop=6, k_start=0, k_stop=4)], [Triangle(q_start=6, q_stop=9, k_start=1, k_stop=4)])
    """
    if window is None:
        return [Rectangle(*q, *k)], []
    rectangles, triangles = [], []
    everything = min(q.stop, q.start + window - distance)
    if q.start < everything:
        rectangles.append(Rectangle(q.start, everything, *k))
    start = max(q.start, everything)
    stop = min(q.stop, q.start + window - distance + k.stop - k.start - 1)
    if start < stop:
        first = k.start + start - q.start + distance - window + 1
        after = first + stop - start
        triangles.append(Triangle(start, stop, first, after))
        if after < k.stop:
            rectangles.append(Rectangle(start, stop, after, k.stop))
    return rectangles, triangles


def _own_blocks(q: Span, window: int | None) -> tuple[list[Span], list[Rectangle], list[Triangle]]:
    """Blocks of a stretch with its own keys: a square, or several that are no longer than the window."""
    if window is None or q.stop - q.start <= window:
        return [q], [], []
    squares = [Span(start, min(start + window, q.stop)) for start in range(q.start, q.stop, window)]
    rectangles, triangles = [], []
    for before, square in itertools.pairwise(squares):
        for blocks, into in zip(_within(square, before, window, window), (rectangles, triangles), strict=True):
            into += blocks
    return squares, rectangles, triangles


def _blocks(
    segments: Sequence[Segment], queries: Sequence[Span], keys: Sequence[Span], window: int | None
) -> tuple[tuple[Span, ...], tuple[Rectangle, ...], tuple[Triangle, ...]]:
    """Blocks of the queries in some spans with the keys in others: squares, rectangles, triangles of row numbers."""
    squares, rectangles, triangles = [], [], []
    starts = [segment.start for segment in segments]
    origins = _origins(segments)
    key_rows = _rows(keys)
    for q_span, q_offset in _rows(queries):
        first, end = bisect.bisect_right(starts, q_span.start) - 1, bisect.bisect_left(starts, q_span.stop)
        for segment in segments[first:end]:
            q = _common(segment, q_span)
            assert q is not None
            q_rows = Span(q.start + q_offset, q.stop + q_offset)
            if q_span in keys:
                for blocks, into in zip(_own_blocks(q_rows, window), (squares, rectangles, triangles), strict=True):
                    into += blocks
            before = [(segment, k_row) for k_row in key_rows if k_row[0].stop <= q_span.start]
            shared = [(ancestor, k_row) for ancestor in _ancestors(segments, segment) for k_row in key_rows]
            for attended, (k_span, k_offset) in [*before, *shared]:
                k = _common(attended, k_span)
                if k is not None:
                    k_rows = Span(k.start + k_offset, k.stop + k_offset)
                    distance = q.start + origins[segment] - (k.start + origins[attended])
                    for blocks, into in zip(
                        _within(q_rows, k_rows, distance, window), (rectangles, triangles), strict=True
                    ):
                        into += blocks
    return tuple(squares), _merged(rectangles), tuple(triangles)


def _origins(segments: Sequence[Segment]) -> dict[Segment, int]:
    """Offsets from the number of a segment's token in the packed sequence to its position in its document."""
    origins: dict[Segment, int] = {}
    for segment in segments:
        prefix = None if segment.prefix is None else segments[segment.prefix]
        origins[segment] = (0 if prefix is None else origins[prefix] + prefix.stop) - segment.start
    return origins


def _needed(blocks: Iterable[Rectangle | Triangle]) -> tuple[Span, ...]:
    """The keys of some blocks: disjoint spans, ascending."""
    spans: list[Span] = []
    for start, stop in sorted((block.k_start, block.k_stop) for block in blocks):
        if spans and start <= spans[-1].stop:
            spans[-1] = Span(spans[-1].start, max(stop, spans[-1].stop))
        else:
            spans.append(Span(start, stop))
    return tuple(spans)


def _arrived(block: _Block, needed: Sequence[Span]) -> _Block:
    """The block with its keys counted in the order in which the needed spans arrive."""
    span, offset = next((s, o) for s, o in _rows(needed) if s.start <= block.k_start < s.stop)
    assert block.k_stop <= span.stop
    return block._replace(k_start=block.k_start + offset, k_stop=block.k_stop + offset)


def rank_plan(segments: Sequence[Segment], rank: int, ranks: int, window: int | None = None) -> RankPlan:
    """The blocks that one rank of a sequence-parallel group computes, and the keys that it gets and gives for them.

    Segments follow one another and fill the sequence, whose length 2 · ranks divides (on one rank, any length). At
    step s a rank gets keys from rank − s, and only those that its queries attend to. With a window a token attends to
    keys at distances from 0 to window − 1 along its document: a segment, and before it what the segment continues.

    >>> rank_plan(segments_of([3, 5]), 0, 2).squares
    (Span(start=0, stop=2), Span(start=2, stop=4))
    >>> rank_plan(segments_of([3, 5]), 0, 2).exchanges[0].rectangles
    (Rectangle(q_start=2, q_stop=4, k_start=0, k_stop=3),)
    """
    if not segments:
        raise ValueError("a plan needs at least one segment: padding is a segment of its own")
    if window is not None and window < 1:
        raise ValueError(f"a token sees at least itself: a window is at least 1, got {window}")
    total = segments[-1].stop
    spans = [held(total, other, ranks) for other in range(ranks)]
    squares, rectangles, triangles = _blocks(segments, spans[rank], spans[rank], window)
    exchanges = []
    for step in range(1, ranks):
        source, destination = (rank - step) % ranks, (rank + step) % ranks
        received = _blocks(segments, spans[rank], spans[source], window)[1:]
        requested = _blocks(segments, spans[destination], spans[rank], window)[1:]
        get, give = (_needed([*blocks[0], *blocks[1]]) for blocks in (received, requested))
        arrived = tuple(_arrived(rectangle, get) for rectangle in received[0])
        corners = tuple(_arrived(triangle, get) for triangle in received[1])
        exchanges.append(Exchange(source, get, arrived, destination, give, corners))
    tokens = sum(s.stop - s.start for s in spans[rank])
    return RankPlan(tokens, squares, rectangles, tuple(exchanges), triangles)
