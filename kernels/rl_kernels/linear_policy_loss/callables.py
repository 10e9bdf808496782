"""The loss that the caller gives: what it returns, its gradient, and whether its rows are independent."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Loss = Callable[[Tensor, Tensor, Tensor, slice], Any]


def split(result: Any) -> tuple[Tensor, Any]:
    """The scalar, and detached metrics or None."""
    total, metrics = result if isinstance(result, tuple) else (result, None)
    if not isinstance(total, Tensor) or total.dim() or not total.is_floating_point():
        what = f"{total.dtype} {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise ValueError(f"loss must return a scalar tensor, or one and metrics in a tuple, got {what}")
    return total, pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, metrics)


def differentiated(loss: Loss, outputs: Sequence[Tensor], rows: slice) -> tuple[Tensor, Any, list[Tensor]]:
    """Value, metrics, and the gradient in log-probabilities, entropy and logsumexp."""
    leaves = [x.detach().requires_grad_() for x in outputs]
    with torch.enable_grad():
        total, metrics = split(loss(*leaves, rows))  # pyright: ignore[reportCallIssue]
        if not total.requires_grad:
            return total, metrics, [torch.zeros_like(x) for x in leaves]
        _refuse_other_leaves(total, leaves)
        gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return total.detach(), metrics, list(gradients)


def refuse_interaction(loss: Loss, outputs: Sequence[Tensor], gradients: Sequence[Tensor], rows: slice) -> None:
    """Raise where a block's gradient differs from that of its two parts. The cut is at an odd row, where few sequences
    end.
    """
    count = rows.stop - rows.start
    if count < 2:
        return
    cut = count // 2 | 1
    parts = [
        differentiated(loss, [x[a:b] for x in outputs], slice(rows.start + a, rows.start + b))[2]
        for a, b in ((0, cut), (cut, count))
    ]
    whole = torch.cat([x.reshape(-1) for x in gradients]).nan_to_num()
    both = torch.cat([torch.cat(pair).reshape(-1) for pair in zip(*parts, strict=True)]).nan_to_num()
    gap, size = (whole - both).abs().amax(), torch.maximum(whole.abs().amax(), both.abs().amax())
    if bool(gap > 1e-3 * size):
        raise ValueError(
            f"the rows of the loss interact: cut in two, rows {rows.start} to {rows.stop} have a gradient that differs "
            f"by {gap.item():.3g} of at most {size.item():.3g}. fused=True takes a sum over rows divided by numbers "
            "known before it; for anything else take fused=False"
        )


def _refuse_other_leaves(total: Tensor, leaves: Sequence[Tensor]) -> None:
    """Raise for another tensor that requires a gradient: it would not get one, as the graph ends within the forward."""
    seen, waiting = set(), [total.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and not any(variable is leaf for leaf in leaves):
            raise ValueError(
                f"the loss holds a tensor {tuple(variable.shape)} that requires a gradient, which it would not get "
                "with fused=True: detach it, or take fused=False"
            )
        waiting += [following for following, _ in node.next_functions]
