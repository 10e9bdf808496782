"""Nested functions as generated code calls them: custom derivatives, cond, scan, while."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_bridge.functional import runtime

_ONCE = "from_jax: create_graph=True through a jax.custom_vjp or custom_jvp function, whose rule is differentiated once"
Function = Callable[..., Sequence[Tensor]]


class _Custom(torch.autograd.Function):
    """A function whose derivative JAX code defines. Its residuals are not differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, forward: Function, backward: Function, results: int, floats: int, wanted: Any, *arguments: Tensor
    ) -> Any:
        values = forward(*arguments)
        outputs, residuals = values[:results], values[results:]
        ctx.rule, ctx.floats, ctx.wanted = backward, floats, wanted
        ctx.mark_non_differentiable(*[x for x in outputs if not x.is_floating_point()])
        ctx.save_for_backward(*residuals)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            # Not once_differentiable: it looks at the cotangents alone, and loses what depends on the residuals.
            raise RuntimeError(_ONCE)
        gradients = iter(ctx.rule(*ctx.saved_tensors, *cotangents[: ctx.floats]))
        return (None,) * 5 + tuple(next(gradients) if needed else None for needed in ctx.wanted)


def custom(
    forward: Function, backward: Function, results: int, floats: int, wanted: tuple[bool, ...], *arguments: Tensor
) -> Sequence[Tensor]:
    """`forward` returns the results, floating ones first, then the residuals.

    `backward` takes the residuals and the cotangents; `wanted` says which arguments have a gradient.
    """
    return _Custom.apply(forward, backward, results, floats, wanted, *arguments)  # pyright: ignore[reportReturnType]


def cond(which: Tensor, branches: Sequence[Function], *operands: Tensor) -> list[Tensor]:
    """Runs every branch and selects by number, so that the number never leaves the device. JAX has brought it in range.

    A branch not taken gets no gradient: its operands pass through a `where` whose backward drops what it computed, NaN
    included (0 * NaN would survive a plain select).
    """
    results: list[Tensor] = []
    for number, branch in enumerate(branches):
        is_branch = which == number
        guarded = [torch.where(is_branch, x, x.detach()) if x.is_floating_point() else x for x in operands]
        outputs = branch(*guarded)
        results = [torch.where(is_branch, new, old) for new, old in zip(outputs, results or outputs, strict=True)]
    return results


def scan(
    body: Function, length: int, reverse: bool, counts: tuple[int, int], shapes: Sequence[Any], *arguments: Tensor
) -> list[Tensor]:
    """lax.scan as a Python loop. `counts`: constants and carries among the arguments; `shapes`: of what is stacked."""
    constants, carry = arguments[: counts[0]], list(arguments[counts[0] : sum(counts)])
    rows = [x.unbind(0) for x in arguments[sum(counts) :]]
    stacked: list[list[Tensor]] = [[] for _ in shapes]
    for step in range(length - 1, -1, -1) if reverse else range(length):
        results = body(*constants, *carry, *(row[step] for row in rows))
        carry = list(results[: counts[1]])
        for column, value in zip(stacked, results[counts[1] :], strict=True):
            column.append(value)
    device = arguments[0].device if arguments else None
    columns = [
        torch.stack(column[::-1] if reverse else column) if column else torch.empty(shape, dtype=dtype, device=device)
        for column, (shape, dtype) in zip(stacked, shapes, strict=True)
    ]
    return [*carry, *columns]


def while_loop(condition: Function, body: Function, counts: tuple[int, int], *arguments: Tensor) -> list[Tensor]:
    """lax.while_loop with a data-dependent end. Asking for the condition waits for the device."""
    if runtime.tracing():
        raise NotImplementedError(
            "lax.while_loop with a data-dependent condition cannot be traced by torch.compile; "
            "use lax.fori_loop with fixed bounds, lax.scan, or call it outside of the compiled region"
        )
    for_condition, for_body = arguments[: counts[0]], arguments[counts[0] : sum(counts)]
    carry = list(arguments[sum(counts) :])
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*for_body, *carry)):
        raise NotImplementedError("lax.while_loop has no reverse-mode derivative in JAX, so from_jax gives it none")
    while bool(condition(*for_condition, *carry)[0]):
        carry = list(body(*for_body, *carry))
    return carry
