"""Causal attention inside each of many documents: one call for neighbours of one length, not a call a document.

Nothing is padded or moved: on a CPU the padding of documents of about one length cost more than the calls it saved.
"""

import inspect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention.varlen import varlen_attn

from rl_bridge.parallel.attention import blocks
from rl_bridge.parallel.attention.plan import Span

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
