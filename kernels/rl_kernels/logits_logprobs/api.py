"""One signature for all backends of ``logits_logprobs``."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_kernels.backends import implementation
from rl_kernels.common.arguments import ROWS, Rows, rows_of


class TokenLogprobs(NamedTuple):
    """In float32: log p(token), the entropy of p in nats, and the logsumexp of the scaled logits."""

    logprobs: Tensor
    entropy: Tensor
    logsumexp: Tensor


def logits_logprobs(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    allowed_tokens: Tensor | None = None,
    mask: Tensor | None = None,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> TokenLogprobs:
    """Log-probability, entropy and logsumexp of the distribution that the tokens were sampled from, differentiable.

    x = softcap·tanh(logit_scale·z/softcap)/temperature (without a cap: logit_scale·z/temperature), over allowed
    tokens;
    lse = log Σᵥ exp xᵥ;  logprob = x[token] − lse;  entropy = −Σᵥ pᵥ log pᵥ.

    Args:
        logits: ``[*batch, V]`` in any float dtype; the arithmetic is float32 (float64 for float64 logits). −inf marks
            a token that cannot be sampled.
        tokens: ``[*batch]`` integer token ids, or ``[*batch, K]`` for the log-probabilities of K tokens a row.
        temperature: one positive number, or one for each row (``[*batch]``), whose values are not checked and take no
            gradient.
        logit_scale: the model's own factor of the logits (Cohere's, Granite's), before the cap.
        softcap: Gemma's logit soft cap, or None.
        allowed_tokens: those a truncated sampler may draw: ids ``[*batch, S]`` in any order filled with −1, or
            bool ``[*batch, V]`` or ``[V]``. Any other token has log-probability −inf and takes no gradient.
        mask: bool ``[*batch]``; where False the row is not computed, its results are 0, and it takes no gradient,
            whatever it holds.
        inplace_backward: write the gradient over the logits, which costs no memory and leaves them unusable.
        backend: ``"torch"``, ``"triton"`` or ``"reference"`` (rl_fn through XLA, all rows at once). None takes the best
            supported one.

    Returns:
        ``TokenLogprobs(logprobs, entropy, logsumexp)``: shaped as ``tokens``, ``[*batch]``, ``[*batch]``.

    Raises:
        ValueError: shapes that do not fit, tokens that are not integers, a temperature (as a number), scale or softcap
            that is not positive.
        NotImplementedError: a backend that does not exist or cannot run here; the message lists those that can.

    >>> logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    >>> result = logits_logprobs(logits, torch.tensor([1]))
    >>> [round(float(value), 4) for value in result]
    [-0.6931, 0.6931, 0.6931]
    """
    rows = rows_of(
        logits.shape[:-1],
        logits.shape[-1],
        logits.dtype,
        tokens,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        allowed_tokens=allowed_tokens,
        mask=mask,
    )
    flat = logits.reshape(len(rows.inv_temperature), logits.shape[-1])
    logprobs, entropy, logsumexp = _forward(flat, *rows, inplace_backward, backend)
    return TokenLogprobs(
        logprobs.view(tokens.shape), entropy.view(logits.shape[:-1]), logsumexp.view(logits.shape[:-1])
    )


_BACKWARD = f"{ROWS}, Tensor[] outputs, Tensor[] cotangents, str? backend"


@torch.library.custom_op(
    "rl_kernels::logits_logprobs",
    mutates_args=(),
    schema=f"(Tensor logits, {ROWS}, bool inplace_backward, str? backend) -> (Tensor, Tensor, Tensor)",
)
def _forward(logits, *arguments):
    *rows, _, backend = arguments
    return implementation("logits_logprobs", logits.device.type, backend).forward(logits, Rows(*rows))


@_forward.register_fake
def _(logits, tokens, inv_temperature, *_):
    return inv_temperature.new_empty(tokens.shape), torch.empty_like(inv_temperature), torch.empty_like(inv_temperature)


def _write(logits: Tensor, arguments: tuple[Any, ...], gradient: Tensor) -> None:
    """dL/dlogits into ``gradient``, which may be the logits' own memory."""
    *rows, outputs, cotangents, backend = arguments
    run = implementation("logits_logprobs", logits.device.type, backend).backward
    run(logits, Rows(*rows), tuple(outputs), tuple(cotangents), gradient)


@torch.library.custom_op(
    "rl_kernels::logits_logprobs_backward", mutates_args=(), schema=f"(Tensor logits, {_BACKWARD}) -> Tensor"
)
def _backward(logits, *arguments):
    gradient = torch.empty_like(logits)
    _write(logits, arguments, gradient)
    return gradient


@_backward.register_fake
def _(logits, *_):
    return torch.empty_like(logits)


@torch.library.custom_op(
    "rl_kernels::logits_logprobs_backward_",
    mutates_args=("logits",),
    schema=f"(Tensor(a!) logits, {_BACKWARD}) -> ()",
)
def _backward_(logits, *arguments):
    _write(logits, arguments, logits)


def _setup(ctx, inputs, output):
    logits, tokens, inv_temperature, softcap, allowed_tokens, mask, inplace_backward, backend = inputs
    ctx.save_for_backward(logits, tokens, inv_temperature, allowed_tokens, mask, *output)
    ctx.softcap, ctx.inplace, ctx.backend = softcap, inplace_backward, backend


def _differentiate(ctx, *cotangents):
    logits, tokens, inv_temperature, allowed_tokens, mask, *outputs = ctx.saved_tensors
    rows = Rows(tokens, inv_temperature, ctx.softcap, allowed_tokens, mask)
    if ctx.inplace:
        gradient = logits.detach()
        _backward_(gradient, *rows, outputs, list(cotangents), ctx.backend)
    else:
        gradient = _backward(logits, *rows, outputs, list(cotangents), ctx.backend)
    return gradient, *[None] * 7


_forward.register_autograd(_differentiate, setup_context=_setup)
