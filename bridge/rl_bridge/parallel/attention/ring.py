"""Attention by a plan: packed documents on one rank, and zigzag ring attention over the ranks of a group.

Every rank holds two chunks of the sequence, with their queries, keys and values. Ranks exchange keys and values in
R − 1 steps, step s with the ranks at distance s, and only the keys that the other's queries attend to: all of them for
one long document, few or none for many short ones. The backward pass asks for the keys again and returns their
gradients, so that a rank keeps T / R tokens of everything.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rl_bridge.parallel.attention.blocks import sinks_gradient, with_sinks
from rl_bridge.parallel.attention.plan import Exchange, RankPlan, Segment, Span, rank_plan
from rl_bridge.parallel.attention.rectangles import Rectangles, Squares

# Groups whose ranks have all spoken to one another.
_connected: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


class AttentionPlan:
    """The plan for the attention of every layer: which blocks to compute and with which ranks to exchange keys."""

    def __init__(
        self, segments: Sequence[Segment], device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        """The ranks of ``group``, the sequence-parallel group, give the same segments, in the same order."""
        self.segments = tuple(segments)
        self.group = group
        self.device = device
        self.longest = max(_document_lengths(segments), default=0)
        self._blocks: dict[int | None, _Blocks] = {}
        self.rank_plan: RankPlan = self._of_window(None).plan
        self.uses = 0
        """How many attention layers have followed this plan."""
        self.layers: set[int] = set()
        """``id`` of the modules that have: of the attention layers of a model."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of this rank's tokens, [T, H, Dv]. q: [T, H, D]; k: [T, H / G, D]; v: [T, H / G, Dv].

        Args:
            q: queries; k and v: keys and values.
            k: see q.
            v: see q.
            scale: of the products of queries and keys, which gives scores.
            window: a token sees so many of the last tokens of its document, itself among them; None: all of them.
            softcap: a score z becomes softcap · tanh(z / softcap).
            sinks: [H], a logit a head that takes a part of the probability; differentiable.
        """
        self.uses += 1
        if window is not None and window >= self.longest:
            window = None
        one_call = self.group is None and softcap is None and sinks is None and not self.rank_plan.rectangles
        if one_call:
            squares = self._of_window(None).squares
            if squares.go_in_one_call(q, v):
                return squares.in_one_call(q, k, v, scale, window)
        score = {"scale": scale, "softcap": softcap}
        with torch.autocast(q.device.type, enabled=False):
            return _Attention.apply(q, k, v, sinks, self._of_window(window), score)  # pyright: ignore[reportReturnType]

    def _of_window(self, window: int | None) -> "_Blocks":
        if window not in self._blocks:
            self._blocks[window] = _Blocks(self.segments, self.device, self.group, window)
        return self._blocks[window]


class _Blocks:
    """The blocks of layers that have one window."""

    def __init__(
        self, segments: Sequence[Segment], device: torch.device, group: dist.ProcessGroup | None, window: int | None
    ) -> None:
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        self.group = group
        self.plan = rank_plan(segments, rank, ranks, window)
        self.squares = Squares(self.plan.squares, device)
        self.others = Rectangles(self.plan.rectangles, device, self.plan.triangles)
        self.foreign = [Rectangles(x.rectangles, device, x.triangles) for x in self.plan.exchanges]


def _document_lengths(segments: Sequence[Segment]) -> list[int]:
    """The length of each segment together with all that it continues."""
    lengths: list[int] = []
    for segment in segments:
        before = 0 if segment.prefix is None else lengths[segment.prefix]
        lengths.append(before + segment.stop - segment.start)
    return lengths


class _Messages:
    """Tensors under way to one rank and from another. They live as long as this object."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        sent: Sequence[torch.Tensor],
        destination: int,
        received: Sequence[torch.Tensor],
        source: int,
        tag: int,
    ) -> None:
        """Start to send and to receive. A tensor without rows is no message: both of its ranks know that."""
        self.sent, self.received = sent, received
        operations = [
            dist.P2POp(operation, tensor, group=group, tag=tag + number, group_peer=peer)
            for operation, tensors, peer in ((dist.isend, sent, destination), (dist.irecv, received, source))
            for number, tensor in enumerate(tensors)
            if len(tensor)
        ]
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Sequence[torch.Tensor]:
        """The tensors from the other rank, once they have come."""
        for work in self.works:
            work.wait()
        return self.received


def _get_keys(exchange: Exchange, keys_values: Sequence[torch.Tensor], group: dist.ProcessGroup) -> _Messages:
    give = [_rows(x, exchange.give) for x in keys_values]
    get = [x.new_empty((_length(exchange.get), *x.shape[1:])) for x in keys_values]
    return _Messages(group, sent=give, destination=exchange.destination, received=get, source=exchange.source, tag=0)


def _return_gradients(
    exchange: Exchange, gradients: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> Sequence[torch.Tensor]:
    """Send the gradients of foreign keys and values home; get those of own ones that the destination has computed."""
    received = [x.new_empty((_length(exchange.give), *x.shape[1:])) for x in gradients]
    return _Messages(
        group, sent=gradients, destination=exchange.source, received=received, source=exchange.destination, tag=2
    ).wait()


class _Exchanges:
    """Keys and values of the other ranks, step by step. The first step is under way while own keys are computed."""

    def __init__(self, blocks: _Blocks, *keys_values: torch.Tensor) -> None:
        self.group, self.keys_values = blocks.group, keys_values
        self.exchanges = blocks.plan.exchanges
        if self.group is not None:
            _connect(self.group, keys_values[0].device)
            self.first = _get_keys(self.exchanges[0], keys_values, self.group)

    def __iter__(self) -> Iterator[tuple[Exchange, Sequence[torch.Tensor]]]:
        if self.group is None:
            return
        coming = self.first
        for exchange, following in zip(self.exchanges, [*self.exchanges[1:], None], strict=True):
            present = coming.wait()
            if following is not None:
                coming = _get_keys(following, self.keys_values, self.group)
            yield exchange, present


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """The first communication of an NCCL group is one of all its ranks; an exchange may be one of a few."""
    if group not in _connected:
        dist.all_reduce(torch.zeros((), device=device), group=group)
        _connected.add(group)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        of_heads: torch.Tensor | None,
        blocks: _Blocks,
        score: dict[str, Any],
    ) -> torch.Tensor:
        exchanges = _Exchanges(blocks, k, v)
        plan = blocks.plan
        exact = torch.float64 if q.dtype == torch.float64 else torch.float32
        merged = exact if plan.rectangles or plan.triangles or plan.exchanges else q.dtype
        out, lse = q.new_empty((*q.shape[:2], v.shape[2]), dtype=merged), q.new_empty(q.shape[:2], dtype=exact)
        blocks.squares.forward(q, k, v, out, lse, **score)
        blocks.others.forward(q, (k, v), out, lse, **score)
        for foreign, (_, keys_values) in zip(blocks.foreign, exchanges, strict=True):
            foreign.forward(q, keys_values, out, lse, **score)
        if of_heads is not None:
            out, lse = with_sinks(out, lse, of_heads)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, of_heads)
        ctx.blocks, ctx.score = blocks, score
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.autocast(grad.device.type, enabled=False):
            return _gradients(grad, ctx.saved_tensors, blocks=ctx.blocks, score=ctx.score)


def _gradients(
    grad: torch.Tensor, saved: Sequence[torch.Tensor], *, blocks: _Blocks, score: dict[str, Any]
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of all that ``_Attention.forward`` takes; ``saved``: the tensors that it saved."""
    q, k, v, out, lse, of_heads = saved
    exchanges = _Exchanges(blocks, k, v)
    dq, dk, dv = (torch.empty_like(x, dtype=lse.dtype) for x in (q, k, v))
    blocks.squares.backward(grad, (q, k, v, out, lse), (dq, dk, dv), **score)
    blocks.others.backward(grad, (q, k, v, out, lse), (dq, dk, dv), **score)
    for computed, (exchange, keys_values) in zip(blocks.foreign, exchanges, strict=True):
        assert blocks.group is not None
        foreign = [torch.zeros_like(x, dtype=lse.dtype) for x in keys_values]
        computed.backward(grad, (q, *keys_values, out, lse), (dq, *foreign), **score)
        for gradient, part in zip((dk, dv), _return_gradients(exchange, foreign, blocks.group), strict=True):
            _add_rows(gradient, exchange.give, part)
    dsinks = None if of_heads is None else sinks_gradient(grad, out, lse, of_heads)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


def _rows(x: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    return torch.cat([x[span.start : span.stop] for span in spans]) if spans else x[:0]


def _add_rows(into: torch.Tensor, spans: Sequence[Span], rows: torch.Tensor) -> None:
    for span, part in zip(spans, rows.split([span.stop - span.start for span in spans]), strict=True):
        into[span.start : span.stop] += part


def _length(spans: Sequence[Span]) -> int:
    return sum(span.stop - span.start for span in spans)
