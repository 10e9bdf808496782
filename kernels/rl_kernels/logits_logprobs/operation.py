"""One signature for all backends of ``logits_logprobs``."""

from typing import Any, NamedTuple

import torch

from rl_kernels.backends import resolve

_BACKENDS = ("torch", "reference")


class LogitsLogprobs(NamedTuple):
    """Per row, in float32: log p(token), the entropy of p in nats, and the logsumexp of the scaled logits."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    logsumexp: torch.Tensor


def logits_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    softcap: float | None = None,
    backend: str | None = None,
) -> LogitsLogprobs:
    """Log-probability, entropy and logsumexp of softmax(cap(logits)/temperature), differentiable.

    x = softcap·tanh(z/softcap)/temperature (x = z/temperature without a softcap);
    lse = log Σᵥ exp xᵥ;  logprob = x[token] − lse;  entropy = lse − Σᵥ pᵥ xᵥ.

    Args:
        logits: ``[*batch, V]`` in any float dtype; the arithmetic is float32 (float64 for float64 logits). −inf marks
            a token that cannot be drawn.
        tokens: ``[*batch]`` integer token ids.
        temperature: one positive number, or one for each row (``[*batch]``), whose values are not checked and take no
            gradient.
        softcap: Gemma's logit soft cap, or None.
        backend: ``"torch"`` or ``"reference"`` (rl_fn through XLA, not differentiable here). None takes the best
            supported one.

    Returns:
        ``LogitsLogprobs(logprobs, entropy, logsumexp)``, each ``[*batch]``.

    Raises:
        ValueError: shapes that do not fit, tokens that are not integers, a temperature (as a number) or softcap that is
            not positive.
        NotImplementedError: a backend that does not exist; the message lists those that do.

    >>> logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    >>> result = logits_logprobs(logits, torch.tensor([1]))
    >>> [round(float(value), 4) for value in result]
    [-0.6931, 0.6931, 0.6931]
    """
    if tokens.shape != logits.shape[:-1]:
        raise ValueError(f"tokens must have shape {tuple(logits.shape[:-1])}, got {tuple(tokens.shape)}")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(f"tokens must be integers, got {tokens.dtype}")
    if isinstance(temperature, torch.Tensor):
        if temperature.dim() and temperature.shape != tokens.shape:
            raise ValueError(f"temperature must be a number or {tuple(tokens.shape)}, got {tuple(temperature.shape)}")
    elif not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}")
    run: Any = resolve("logits_logprobs", _BACKENDS, backend)
    return LogitsLogprobs(*run(logits, tokens, temperature, softcap))
