"""Causal attention inside each of many documents: one call for documents of about one length, not a call a document."""

import inspect
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch.nn.attention.varlen import varlen_attn

from rl_bridge.parallel.attention import blocks
from rl_bridge.parallel.attention.plan import Span

# Before torch 2.12 the operation wants as many heads of keys as of queries.
_ONE_CALL = "enable_gqa" in inspect.signature(varlen_attn).parameters
# A document joins a call whose longest is at most so many times as long: the padding is computed too. Above a length,
# only documents of one length share a call. Calls cost more on a GPU, and arithmetic on a CPU.
_WIDER = {"cpu": (1.15, 64), "other": (1.5, 512)}


def length_classes(lengths: Sequence[int], wider: float, limit: int) -> list[list[int]]:
    """Numbers of the documents that share a call, longest first.

    >>> length_classes([4, 900, 1, 901, 33, 24, 4], wider=1.5, limit=512)
    [[3], [1], [4, 5], [0, 6], [2]]
    """
    classes: list[list[int]] = []
    longest = 0
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[number]
        alike = length == longest or longest <= min(limit, wider * length)
        if classes and alike:
            classes[-1].append(number)
        else:
            classes.append([number])
            longest = length
    return classes


class _Class:
    """Documents of one call: [count, longest], padded on the right, where causal attention never looks."""

    def __init__(self, documents: Sequence[Span], device: torch.device) -> None:
        self.count, self.longest = len(documents), max(d.stop - d.start for d in documents)
        self.start = min(d.start for d in documents)
        starts = torch.tensor(sorted(d.start for d in documents))
        # Documents of one length that follow one another are read where they are.
        self.in_place = bool((starts == self.start + self.longest * torch.arange(self.count)).all())
        self.in_place &= all(d.stop - d.start == self.longest for d in documents)
        if not self.in_place:
            first = torch.tensor([d.start for d in documents])[:, None]
            last = torch.tensor([d.stop - 1 for d in documents])[:, None]
            rows = first + torch.arange(self.longest)
            used = (rows <= last).flatten()
            # Padding repeats the last token: any finite values would do.
            self.rows = torch.minimum(rows, last).flatten().to(device)
            self.used = used.nonzero()[:, 0].to(device)
            self.unused = (~used).nonzero()[:, 0].to(device)
            self.tokens = self.rows[self.used]

    def read(self, x: torch.Tensor, *, padding: float | None = None) -> torch.Tensor:
        """[T, H, …] as [count, H, longest, …]."""
        if self.in_place:
            rows = x[self.start : self.start + self.count * self.longest]
        else:
            rows = x.index_select(0, self.rows)
            if padding is not None:
                rows.index_fill_(0, self.unused, padding)
        return rows.unflatten(0, (self.count, self.longest)).transpose(1, 2)

    def write(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """Write [count, H, longest, …] to [T, H, …], without the padding."""
        rows = values.transpose(1, 2).flatten(0, 1).to(into.dtype)
        if self.in_place:
            into[self.start : self.start + self.count * self.longest] = rows
        else:
            into.index_copy_(0, self.tokens, rows.index_select(0, self.used))


class Squares:
    """Causal squares over the rows of a tensor: documents, or the stretches of documents that a rank holds."""

    def __init__(self, squares: Iterable[Span], device: torch.device) -> None:
        squares = sorted(squares)
        self.longest = max(s.stop - s.start for s in squares)
        self.boundaries = torch.tensor([0, *(s.stop for s in squares)], dtype=torch.int32, device=device)
        assert all(a.stop == b.start for a, b in itertools.pairwise(squares)), squares
        classes = length_classes([s.stop - s.start for s in squares], *_WIDER.get(device.type, _WIDER["other"]))
        self.classes = [_Class([squares[i] for i in members], device) for members in classes]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
    ) -> None:
        """Write attention to out [T, H, D] and its logsumexp to lse [T, H]. q: [T, H, D]; k, v: [T, H / G, D]."""
        for documents in self.classes:
            q_, k_, v_ = (documents.read(x) for x in (q, k, v))
            block_out, block_lse = blocks.forward(q_, k_, v_, causal=True, scale=scale)
            documents.write(out, block_out)
            documents.write(lse, block_lse)

    def backward(
        self,
        grad: torch.Tensor,
        saved: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        scale: float,
    ) -> None:
        """Write the squares' part of the gradients to into = (dq, dk, dv), where saved = (q, k, v, out, lse)."""
        for documents in self.classes:
            # Padding has gradient 0, so that no gradient comes from it.
            grad_ = documents.read(grad, padding=0.0)
            saved_ = [documents.read(x) for x in saved]
            for gradient, part in zip(into, blocks.backward(grad_, *saved_, causal=True, scale=scale), strict=True):
                documents.write(gradient, part)

    def go_in_one_call(self, q: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether there is an operation that takes all of the squares."""
        return _ONE_CALL and blocks.operation(q, v) == "cuda_flash"

    def in_one_call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of all squares, [T, H, D], by an operation of CUDA that knows where they begin; differentiable."""
        edges, longest = self.boundaries, self.longest
        q, k, v = (x.contiguous() for x in (q, k, v))
        causal = {"window_size": (-1, 0), "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
        out = varlen_attn(q, k, v, edges, edges, longest, longest, **causal)
        assert isinstance(out, torch.Tensor)
        return out
