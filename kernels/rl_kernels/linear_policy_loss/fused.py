"""The gradient during the forward: the logits of a block of rows are computed once, and replaced by their gradient.

Unlike the other operations this is no custom operation: PyTorch passes no function to one.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from rl_kernels.backends import implementation
from rl_kernels.common.arguments import Rows
from rl_kernels.common.blocks import tiles
from rl_kernels.common.matmul import accumulate, matmul, native
from rl_kernels.linear_policy_loss.callables import Loss, differentiated, refuse_interaction

# Numbers a logit that the pass from logits to their gradient holds at once, for at most so many logits.
_TEMPORARIES, _CHUNK = 5, 1 << 22


class Head(NamedTuple):
    """What takes no gradient. With ``many`` the loss sees K log-probabilities a row, else one."""

    rows: Rows
    loss: Loss
    many: bool
    workspace: int
    backend: str | None
    check: bool


class Sizes(NamedTuple):
    """Tokens whose logits are in memory at once, and how much of the vocabulary a tile of the weight has."""

    tokens: int
    vocab: int


def sizes(vocab_size: int, hidden_size: int, workspace: int, width: int) -> Sizes:
    """The largest blocks whose arrays of ``width`` bytes a number stay within ``workspace``, of the model alone."""
    numbers = workspace // width
    vocab = max(1, min(vocab_size, 8192, numbers // (8 * max(1, hidden_size))))
    # A widened tile of the weight and its gradient's GEMM; then for each token its logits, a narrow copy of a tile of
    # the logits, and three rows of hidden units.
    left = numbers - 2 * vocab * hidden_size
    row = vocab_size + vocab + 3 * hidden_size
    rows = max(left // (row + _TEMPORARIES * vocab_size), (left - _TEMPORARIES * _CHUNK) // row)
    return Sizes(max(1, rows), vocab)


def fused_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head) -> tuple[Tensor, Any]:
    """Total and metrics; the total's gradient is computed before it returns."""
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
        # In a list: autograd would take metrics that are one tensor for a differentiable result.
        return total, [metrics]

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstream):  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RuntimeError("the gradient of a fused linear_policy_loss is gone: its backward runs once")
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if x is None else x.mul_(upstream[0]) for x in gradients), None


class _Gradients:
    """The gradients so far, in the arithmetic's dtype; None for what needs no gradient."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, wanted: Any):
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if wanted[1] else None
        self.bias = torch.zeros(bias.shape, dtype=dtype, device=bias.device) if bias is not None and wanted[2] else None

    def add(self, dlogits: Tensor, index: slice | Tensor, here: Tensor, weight: Tensor, vocab: int) -> None:
        """A block's share: ``here`` are the hidden states of the rows ``index``."""
        sums = None if self.hidden is None else dlogits.new_zeros(here.shape)
        for first, last in tiles(len(weight), vocab):
            exact = dlogits[:, first:last]
            dz = exact.to(weight.dtype) if native(here, weight).matmul else exact
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
    dtype, width = head.rows.inv_temperature.dtype, head.rows.inv_temperature.element_size()
    passes = implementation("linear_policy_loss", hidden.device.type, head.backend)
    size = sizes(weight.shape[0], weight.shape[1], head.workspace, width)
    sums = _Gradients(hidden, weight, bias, dtype, wanted)
    total, metrics, check = head.rows.inv_temperature.new_zeros(()), None, head.check
    for chunk, index in _chunks(len(hidden), head.rows.mask, size.tokens):
        part, more = _block(passes, hidden, weight, bias, head, chunk, index, size.vocab, sums, check)
        total = total + part
        metrics = more if metrics is None else pytree.tree_map(lambda a, b: a + b, metrics, more)
        check = False
    return total, metrics, (sums.hidden, _as(weight, sums.weight), _as(bias, sums.bias))


def _as(parameter: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return None if parameter is None or gradient is None else gradient.to(parameter.dtype)


def _block(passes, hidden, weight, bias, head, chunk, index, vocab, sums, check):
    """Value and metrics of the rows ``chunk``, of which ``index`` count; their gradient is added to ``sums``."""
    here, rows = hidden[index], head.rows._replace(mask=None).take(index)
    logits = _logits(here, weight, bias, rows.inv_temperature.dtype, vocab)
    outputs = passes.forward(logits, rows) if len(here) else _no_rows(rows)
    seen = outputs if head.rows.mask is None else [_spread(x, chunk, index) for x in outputs]
    seen = seen if head.many else (seen[0][:, 0], *seen[1:])
    value, metrics, gradients = differentiated(head.loss, seen, chunk)
    if check:
        refuse_interaction(head.loss, seen, gradients, chunk)
    counted = [x if head.rows.mask is None else x[index - chunk.start] for x in gradients]
    cotangents = (counted[0].reshape(outputs[0].shape), *(x.contiguous() for x in counted[1:]))
    if len(here):
        passes.backward(logits, rows, outputs, cotangents, logits)
        sums.add(logits, index, here, weight, vocab)
    return value, metrics


def _no_rows(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Results of no rows."""
    like = rows.inv_temperature
    return like.new_zeros(rows.tokens.shape), like.new_zeros(0), like.new_zeros(0)


def _logits(here: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, vocab: int) -> Tensor:
    """[R, V] in ``dtype``; a weight that must be widened is widened a tile at a time."""
    if here.dtype == weight.dtype == dtype or (native(here, weight).matmul and dtype == torch.float32):
        logits = matmul(here, weight.T, dtype)
    else:
        logits = here.new_empty(len(here), len(weight), dtype=dtype)
        for first, last in tiles(len(weight), vocab):
            logits[:, first:last] = matmul(here, weight[first:last].T, dtype)
    return logits if bias is None else logits.add_(bias)


def _chunks(count: int, mask: Tensor | None, size: int) -> Iterator[tuple[slice, slice | Tensor]]:
    """Consecutive rows, and those of them that count, at most ``size``: padding costs nothing."""
    if mask is None:
        for start in range(0, max(1, count), size):
            chunk = slice(start, min(start + size, count))
            yield chunk, chunk
        return
    index = mask.nonzero()[:, 0]
    # A chunk ends before the next one's first row that counts. The first also has the rows before its first that
    # counts, the last those after its last.
    starts = [0, *index[size::size].tolist(), count]
    for (start, stop), counted in zip(pairwise(starts), index.split(size), strict=True):
        yield slice(start, stop), counted


def _spread(x: Tensor, chunk: slice, index: slice | Tensor) -> Tensor:
    """Results of the rows that count, among zeros for the chunk's other rows."""
    whole = x.new_zeros(chunk.stop - chunk.start, *x.shape[1:])
    whole[index - chunk.start] = x
    return whole
