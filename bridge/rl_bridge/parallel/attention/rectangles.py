"""Attention of many documents in few calls: squares on the diagonal, rectangles of keys that all queries see.

Nothing is padded or moved: on a CPU the padding of documents of about one length cost more than the calls it saved.

The completions of 48 prompts are 48 rectangles. One by one, calls would cost a small model more than their numbers do.
Rectangles of one width go together, their queries gathered and padded to the longest. Zeros in place of the padding's
gradient keep it out of the backward pass. A triangle read backwards, the last query and the last key first, is a causal
square: no block has a mask.
"""

import inspect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention.varlen import varlen_attn

from rl_bridge.parallel.attention import blocks
from rl_bridge.parallel.attention.blocks import merge_
from rl_bridge.parallel.attention.plan import Rectangle, Span, Triangle

# Causal attention inside each of many documents: one call for neighbours of one length, not a call a document.

# Before torch 2.12 the operation wants as many heads of keys as of queries.
_ONE_CALL = "enable_gqa" in inspect.signature(varlen_attn).parameters


class Run(NamedTuple):
    """Neighbouring documents of one length."""

    start: int
    documents: int
    length: int

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of [T, H, …] as [documents, H, length, …], where they are."""
        rows = x[self.start : self.start + self.documents * self.length]
        return rows.unflatten(0, (self.documents, self.length)).transpose(1, 2)

    def write(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """Write [documents, H, length, …] to [T, H, …]."""
        into[self.start : self.start + self.documents * self.length] = values.transpose(1, 2).flatten(0, 1)


def runs_of(squares: Iterable[Span]) -> list[Run]:
    """The fewest runs of some documents, in their order.

    >>> runs_of([Span(0, 3), Span(3, 6), Span(6, 7), Span(7, 10)])
    [Run(start=0, documents=2, length=3), Run(start=6, documents=1, length=1), Run(start=7, documents=1, length=3)]
    """
    runs: list[Run] = []
    for start, stop in squares:
        last = runs[-1] if runs else None
        if last and stop - start == last.length and start == last.start + last.documents * last.length:
            runs[-1] = last._replace(documents=last.documents + 1)
        else:
            runs.append(Run(start, 1, stop - start))
    return runs


class Squares:
    """Causal squares over the rows of a tensor: documents, or the stretches of documents that a rank holds."""

    def __init__(self, squares: Iterable[Span], device: torch.device) -> None:
        squares = sorted(squares)
        self.longest = max(s.stop - s.start for s in squares)
        self.boundaries = torch.tensor([0, *(s.stop for s in squares)], dtype=torch.int32, device=device)
        assert all(a.stop == b.start for a, b in itertools.pairwise(squares)), squares
        self.runs = runs_of(squares)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        **score: Any,
    ) -> None:
        """Write attention to out [T, H, D] and its logsumexp to lse [T, H]. q: [T, H, D]; k, v: [T, H / G, D].

        ``score``: how ``blocks.forward`` makes scores.
        """
        for run in self.runs:
            block_out, block_lse = blocks.forward(run.read(q), run.read(k), run.read(v), causal=True, **score)
            run.write(out, block_out)
            run.write(lse, block_lse)

    def backward(
        self,
        grad: torch.Tensor,
        saved: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        **score: Any,
    ) -> None:
        """Write the squares' part of the gradients to into = (dq, dk, dv), where saved = (q, k, v, out, lse)."""
        for run in self.runs:
            parts = blocks.backward(run.read(grad), *(run.read(x) for x in saved), causal=True, **score)
            for gradient, part in zip(into, parts, strict=True):
                run.write(gradient, part)

    def go_in_one_call(self, q: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether there is an operation that takes all of the squares."""
        return _ONE_CALL and blocks.operation(q, v) == "cuda_flash"

    def in_one_call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """Attention of all squares, [T, H, D], by an operation of CUDA that knows where they begin; differentiable.

        With a window a query sees so many of the last keys of its square, its own among them.
        """
        edges, longest = self.boundaries, self.longest
        q, k, v = (x.contiguous() for x in (q, k, v))
        before = -1 if window is None else window - 1
        causal = {"window_size": (before, 0), "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
        out = varlen_attn(q, k, v, edges, edges, longest, longest, **causal)
        assert isinstance(out, torch.Tensor)
        return out


# Attention of queries to keys before them: many small rectangles or triangles in one call, not a call each.

# Queries of padding for each query, at most, and queries of padding in one call that are cheaper than another call.
_PADDING, _FREE = 0.25, 256


class _Set(NamedTuple):
    """All queries of some keys. In one call a query stands once: ``turn`` is the number of its earlier calls."""

    keys: Span
    queries: tuple[Span, ...]
    tokens: int
    turn: int


class _Call(NamedTuple):
    """Rows of the queries [B, Q] and of the keys [B, K]; ``real`` are the places in B · Q that are no padding.

    One set whose queries are neighbours is read where it lies: ``queries`` and ``keys`` are slices then. ``causal``: a
    query sees the keys up to its own place, as it does in a triangle that is read backwards.
    """

    queries: torch.Tensor | slice
    keys: torch.Tensor | slice
    real: torch.Tensor | None
    causal: bool = False

    def read(self, x: torch.Tensor, where: torch.Tensor | slice) -> torch.Tensor:
        """Rows of [T, H, …] as [B, H, rows, …]."""
        return (x[where][None] if isinstance(where, slice) else x[where]).transpose(1, 2)

    def write(self, values: torch.Tensor) -> torch.Tensor:
        """[B, H, Q, …] as one row for each query that is no padding."""
        rows = values.transpose(1, 2).flatten(0, 1)
        return rows if self.real is None else rows[self.real]

    def rows(self) -> torch.Tensor | slice:
        """The rows of ``write``'s values."""
        if isinstance(self.queries, slice):
            return self.queries
        return self.queries.flatten() if self.real is None else self.queries.flatten()[self.real]


class Rectangles:
    """Rectangles and triangles over the rows of tensors: queries of this rank, keys of this or another one."""

    def __init__(
        self, rectangles: Iterable[Rectangle], device: torch.device, triangles: Iterable[Triangle] = ()
    ) -> None:
        """A query is in at most one of the triangles."""
        self.calls = [_call(sets, device) for sets in _together(_sets(rectangles))]
        self.calls += [_backwards(alike, device) for alike in _of_about_one_size(triangles)]

    def forward(
        self,
        q: torch.Tensor,
        keys_values: Sequence[torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        **score: Any,
    ) -> None:
        """Take the blocks' keys into out [T, H, D] and its logsumexp lse [T, H]. q: [T, H, D]; k, v: [T', H', D]

        ``score``: how ``blocks.forward`` makes scores.
        """
        k, v = keys_values
        for call in self.calls:
            block = (call.read(q, call.queries), call.read(k, call.keys), call.read(v, call.keys))
            block_out, block_lse = (call.write(x) for x in blocks.forward(*block, causal=call.causal, **score))
            rows = call.rows()
            if isinstance(rows, slice):
                merge_(out[rows], lse[rows], block_out, block_lse)
            else:
                merged = out[rows], lse[rows]
                merge_(*merged, block_out, block_lse)
                out[rows], lse[rows] = merged

    def backward(
        self,
        grad: torch.Tensor,
        saved: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        **score: Any,
    ) -> None:
        """Add the blocks' part of the gradients to into = (dq, dk, dv), where saved = (q, k, v, out, lse)."""
        q, k, v, out, lse = saved
        dq, dk, dv = into
        for call in self.calls:
            upstream = call.read(grad, call.queries)
            if call.real is not None:
                padding = torch.ones(upstream.shape[0] * upstream.shape[2], dtype=torch.bool, device=grad.device)
                padding[call.real] = False
                upstream = upstream.masked_fill(padding.view(upstream.shape[0], 1, -1, 1), 0.0)
            keys = (call.read(x, call.keys) for x in (k, v))
            queries = [call.read(x, call.queries) for x in (q, out, lse)]
            parts = blocks.backward(upstream, queries[0], *keys, *queries[1:], causal=call.causal, **score)
            _add(dq, call.rows(), call.write(parts[0]))
            where = call.keys if isinstance(call.keys, slice) else call.keys.flatten()
            for gradient, part in zip((dk, dv), parts[1:], strict=True):
                _add(gradient, where, part.transpose(1, 2).flatten(0, 1))


def _add(into: torch.Tensor, rows: torch.Tensor | slice, values: torch.Tensor) -> None:
    if isinstance(rows, slice):
        into[rows] += values
    else:
        into.index_add_(0, rows, values.to(into.dtype))


def _sets(rectangles: Iterable[Rectangle]) -> list[_Set]:
    """The queries of each span of keys, and in which turn they are: a query may attend to several spans."""
    queries: dict[Span, list[Span]] = {}
    for r in rectangles:
        queries.setdefault(Span(r.k_start, r.k_stop), []).append(Span(r.q_start, r.q_stop))
    turns = torch.zeros(max((q.stop for of in queries.values() for q in of), default=0), dtype=torch.int64)
    sets = []
    for keys, spans in queries.items():
        rows = _index(spans)
        turn = int(turns[rows].max())
        turns[rows] = turn + 1
        sets.append(_Set(keys, tuple(spans), len(rows), turn))
    return sets


def _together(sets: Iterable[_Set]) -> list[list[_Set]]:
    """Sets that one call takes: of as many keys, in one turn, and of about as many queries."""
    calls: list[list[_Set]] = []
    of_call, real = None, 0
    for part in sorted(sets, key=lambda s: (s.turn, s.keys.stop - s.keys.start, s.tokens)):
        kind, real = (part.turn, part.keys.stop - part.keys.start), real + part.tokens
        # Sets come by their number of queries: this one is the longest so far.
        if kind == of_call and (len(calls[-1]) + 1) * part.tokens - real <= max(_FREE, _PADDING * real):
            calls[-1].append(part)
        else:
            calls.append([part])
            of_call, real = kind, part.tokens
    return calls


def _call(sets: Sequence[_Set], device: torch.device) -> _Call:
    first = sets[0]
    if len(sets) == 1 and all(a.stop == b.start for a, b in zip(first.queries, first.queries[1:], strict=False)):
        return _Call(slice(first.queries[0].start, first.queries[-1].stop), slice(*first.keys), None)
    width = max(s.tokens for s in sets)
    rows = [_index(s.queries) for s in sets]
    # Padding repeats a query of the set itself: exp(score − logsumexp) stays finite.
    queries = torch.stack([torch.cat([r, r[-1:].expand(width - len(r))]) for r in rows])
    keys = torch.stack([torch.arange(*s.keys) for s in sets])
    real = torch.cat([torch.arange(len(r)) + width * i for i, r in enumerate(rows)])
    padded = len(real) < queries.numel()
    return _Call(queries.to(device), keys.to(device), real.to(device) if padded else None)


def _of_about_one_size(triangles: Iterable[Triangle]) -> list[list[Triangle]]:
    """Triangles that one call takes, each padded to the largest."""
    calls: list[list[Triangle]] = []
    real = 0
    for triangle in sorted(triangles, key=lambda t: t.q_stop - t.q_start):
        size = triangle.q_stop - triangle.q_start
        real += size
        if calls and (len(calls[-1]) + 1) * size - real <= max(_FREE, _PADDING * real):
            calls[-1].append(triangle)
        else:
            calls.append([triangle])
            real = size
    return calls


def _backwards(triangles: Sequence[Triangle], device: torch.device) -> _Call:
    """Padding comes last, where no query of a triangle sees it: the triangle's first query, and the first key."""
    size = max(t.q_stop - t.q_start for t in triangles)
    place = torch.arange(size)
    queries, keys = (
        torch.stack([(stop - 1 - place).clamp(min=start) for start, stop in spans])
        for spans in ([(t.q_start, t.q_stop) for t in triangles], [(t.k_start, t.k_stop) for t in triangles])
    )
    real = torch.cat([torch.arange(t.q_stop - t.q_start) + size * i for i, t in enumerate(triangles)])
    padded = len(real) < queries.numel()
    return _Call(queries.to(device), keys.to(device), real.to(device) if padded else None, causal=True)


def _index(spans: Sequence[Span]) -> torch.Tensor:
    return torch.cat([torch.arange(*span) for span in spans])
