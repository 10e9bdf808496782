"""dot_general as torch.einsum, which torch.autocast leaves alone in the forward and in the backward."""

import contextlib
from typing import Any

import torch
from torch import Tensor


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """A region in which operations compute in the precision of their arguments, as JAX's do."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


class _Contraction(torch.autograd.Function):
    """An einsum of two operands. Its gradients run after the program, so each turns autocast off by itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(letters: tuple[str, str, str], x: Tensor, y: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        left, right, result = letters
        with without_autocast(x.device.type):
            return torch.einsum(f"{left},{right}->{result}", x, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[tuple[str, str, str], Tensor, Tensor], output: Tensor) -> None:
        ctx.letters, x, y = inputs
        ctx.save_for_backward(x, y)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        left, right, result = ctx.letters
        x, y = ctx.saved_tensors
        _, for_x, for_y = ctx.needs_input_grad
        return (
            None,
            contract((result, right, left), cotangent, y) if for_x else None,
            contract((left, result, right), x, cotangent) if for_y else None,
        )


def contract(letters: tuple[str, str, str], x: Tensor, y: Tensor) -> Tensor:
    """einsum of the letters of the two operands and of the result; each letter stands in two of the three."""
    return _Contraction.apply(letters, x, y)  # pyright: ignore[reportReturnType]
