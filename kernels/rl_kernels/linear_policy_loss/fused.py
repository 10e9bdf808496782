"""The gradient during the forward: a block of rows' logits are computed once and become their gradient where they lie.

No custom operation, unlike the others here: those take tensors and numbers, not a function.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from rl_kernels.backends import implementation, select
from rl_kernels.common.arguments import Rows
from rl_kernels.common.blocks import tiles
from rl_kernels.common.matmul import accumulate, native, product
from rl_kernels.linear_policy_loss.callables import Loss, differentiated, refuse_interaction

# Numbers that the pass from logits to their gradient holds at once beside a few rows, and for at most so many logits.
_TEMPORARIES, _CHUNK = 5, 1 << 22


class Head(NamedTuple):
    """Everything that takes no gradient; ``many``: the loss sees K log-probabilities a row, not one."""

    rows: Rows
    loss: Loss
    many: bool
    workspace: int
    backend: str | None
    check: bool


class Sizes(NamedTuple):
    """Rows whose logits are there at once, and entries of the vocabulary in a tile of the weight."""

    rows: int
    entries: int


def sizes(vocabulary: int, features: int, workspace: int, width: int) -> Sizes:
    """The largest blocks whose arrays of ``width`` bytes a number stay within ``workspace``, of the model alone."""
    numbers = workspace // width
    entries = max(1, min(vocabulary, 8192, numbers // (8 * max(1, features))))
    # A tile of the weight and its gradient's product; then for each row logits, a tile of them narrowed, and features.
    left = numbers - 2 * entries * features
    row = vocabulary + entries + 3 * features
    rows = max(left // (row + _TEMPORARIES * vocabulary), (left - _TEMPORARIES * _CHUNK) // row)
    return Sizes(max(1, rows), entries)


def fused_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head) -> tuple[Tensor, Any]:
    """Total and metrics; the total's gradient is known when it returns."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "torch.compile cannot trace fused=True, which differentiates the loss within its forward: call it in a "
            "function under torch.compiler.disable, or take fused=False"
        )
    total, (metrics,) = _Fused.apply(hidden, weight, bias, head)  # pyright: ignore[reportGeneralTypeIssues]
    return total, metrics


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, head):
        # Autocast would round the operands that are widened here on purpose.
        with torch.autocast(hidden.device.type, enabled=False):
            total, metrics, ctx.gradients = _run(hidden, weight, bias, head, ctx.needs_input_grad)
        # In a list, or metrics that are one tensor would be a differentiable result.
        return total, [metrics]

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstream):  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RuntimeError("the gradient of a fused linear_policy_loss is gone: its backward runs once")
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if x is None else x.mul_(upstream[0]) for x in gradients), None


class _Gradients:
    """Sums of what the blocks add, in the arithmetic's dtype; None where nobody asks."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, wanted: Any):
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if wanted[1] else None
        self.bias = torch.zeros(bias.shape, dtype=dtype, device=bias.device) if bias is not None and wanted[2] else None

    def add(self, dlogits: Tensor, index: slice | Tensor, here: Tensor, weight: Tensor, entries: int) -> None:
        """A block's share: ``here`` are the hidden states of the rows ``index``."""
        sums = None if self.hidden is None else dlogits.new_zeros(here.shape)
        for first, last in tiles(len(weight), entries):
            exact = dlogits[:, first:last]
            dz = exact.to(weight.dtype) if native(here, weight).product else exact
            if sums is not None:
                accumulate(sums, dz, weight[first:last])
            if self.weight is not None:
                accumulate(self.weight[first:last], dz.T, here)
            if self.bias is not None:
                self.bias[first:last] += exact.sum(0)
        if self.hidden is not None and sums is not None:
            self.hidden[index] = sums.to(self.hidden.dtype)


def _run(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, wanted: Any
) -> tuple[Tensor, Any, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    inverse = head.rows.inverse
    backend = select("linear_policy_loss", hidden.device.type, head.backend)
    passes = implementation("logits_logprobs", hidden.device.type, backend)
    size = sizes(weight.shape[0], weight.shape[1], head.workspace, inverse.element_size())
    sums = _Gradients(hidden, weight, bias, inverse.dtype, wanted)
    total, metrics, check = inverse.new_zeros(()), None, head.check
    for piece, index in _pieces(len(hidden), head.rows.mask, size.rows):
        part, more = _block(passes, hidden, weight, bias, head, piece, index, size.entries, sums, check)
        total = total + part
        metrics = more if metrics is None else pytree.tree_map(lambda a, b: a + b, metrics, more)
        check = False
    return total, metrics, (sums.hidden, _as(weight, sums.weight), _as(bias, sums.bias))


def _as(parameter: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return None if parameter is None or gradient is None else gradient.to(parameter.dtype)


def _block(passes, hidden, weight, bias, head, piece, index, entries, sums, check):
    """Value and metrics of the rows ``piece``, of which ``index`` count; their gradient is added to ``sums``."""
    tokens, inverse, softcap, allowed_tokens, mask = head.rows
    here = hidden[index]
    logits = _logits(here, weight, bias, inverse.dtype, entries)
    arguments = (
        tokens[index],
        inverse[index],
        softcap,
        None if allowed_tokens is None else allowed_tokens[index],
        None,
    )
    outputs = passes.forward(logits, *arguments) if len(here) else _nothing(tokens, inverse)
    seen = outputs if mask is None else [_spread(x, piece, index, inverse) for x in outputs]
    seen = seen if head.many else (seen[0][:, 0], *seen[1:])
    value, metrics, gradients = differentiated(head.loss, seen, piece)
    if check:
        refuse_interaction(head.loss, seen, gradients, piece)
    counted = [x if mask is None else x[index - piece.start] for x in gradients]
    cotangents = (counted[0].reshape(outputs[0].shape), *(x.contiguous() for x in counted[1:]))
    if len(here):
        passes.backward(logits, *arguments, outputs, cotangents, logits)
        sums.add(logits, index, here, weight, entries)
    return value, metrics


def _nothing(tokens: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Results of no rows."""
    return inverse.new_zeros(0, tokens.shape[1]), inverse.new_zeros(0), inverse.new_zeros(0)


def _logits(here: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, entries: int) -> Tensor:
    """[R, V] in ``dtype``; a weight that must be widened is so a tile at a time."""
    if here.dtype == weight.dtype == dtype or (native(here, weight).product and dtype == torch.float32):
        logits = product(here, weight.T, dtype)
    else:
        logits = here.new_empty(len(here), len(weight), dtype=dtype)
        for first, last in tiles(len(weight), entries):
            logits[:, first:last] = product(here, weight[first:last].T, dtype)
    return logits if bias is None else logits.add_(bias)


def _pieces(count: int, mask: Tensor | None, size: int) -> Iterator[tuple[slice, slice | Tensor]]:
    """Consecutive rows, and those of them that count: at most ``size``, so that nobody computes padding."""
    if mask is None:
        for start in range(0, max(1, count), size):
            piece = slice(start, min(start + size, count))
            yield piece, piece
        return
    index = mask.nonzero()[:, 0]
    # Each piece ends before the next one's first row that counts; the first and the last take what is outside.
    starts = [0, *index[size::size].tolist(), count]
    for (start, stop), counted in zip(pairwise(starts), index.split(size), strict=True):
        yield slice(start, stop), counted


def _spread(x: Tensor, piece: slice, index: slice | Tensor, like: Tensor) -> Tensor:
    """Results of the rows that count among zeros for all of the piece."""
    whole = like.new_zeros(piece.stop - piece.start, *x.shape[1:])
    whole[index - piece.start] = x
    return whole
