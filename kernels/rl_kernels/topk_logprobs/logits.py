"""From logits: the ids, without a gradient, then ``logits_logprobs`` of k tokens a row."""

from typing import NamedTuple

import torch
from torch import Tensor

from rl_kernels.arguments import rows_of
from rl_kernels.backends import implementation
from rl_kernels.logits_logprobs import logits_logprobs


class TopkLogprobs(NamedTuple):
    """Ids of the k most probable tokens, most probable first, and their log-probabilities; the entropy of the whole
    distribution in nats and the logsumexp of its scaled logits.
    """

    tokens: Tensor
    logprobs: Tensor
    entropy: Tensor
    logsumexp: Tensor


def topk_logprobs(
    logits: Tensor,
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    allowed_tokens: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> TopkLogprobs:
    """The k most probable tokens of each row, and their log-probabilities in the whole distribution, differentiable.

    x = softcap·tanh(logit_scale·z/softcap)/temperature, over the kept set;  logprob = x[id] − log Σᵥ exp xᵥ.

    The order is that of the logits, which neither cap nor temperature changes; equal logits go to the lower id, also
    where the cap saturates. What a teacher reports for distillation: ``rl_fn.top_k_distillation`` takes
    ``logprobs`` and ``tokens``.

    Args:
        logits: ``[*batch, V]`` in any float dtype; −inf marks a token that cannot be drawn.
        k: in 1 … V. Where fewer tokens can be drawn, the lowest other ids follow, with log-probability −inf.
        temperature: one positive number, or one for each row (``[*batch]``), whose values are not checked.
        logit_scale: the model's own factor of the logits, before the cap.
        softcap: Gemma's logit soft cap, or None.
        allowed_tokens: the kept set of a truncated sampler, as ``logits_logprobs`` takes it.
        mask: bool ``[*batch]``; a row where it is False is not computed: its ids, results and gradient are 0.
        backend: of the search, ``"triton"``, ``"torch"`` or ``"reference"``, and of ``logits_logprobs`` after it. None
            takes the best supported ones.

    Returns:
        ``TopkLogprobs(tokens, logprobs, entropy, logsumexp)``: int64 ``[*batch, k]``, then ``[*batch, k]``,
        ``[*batch]``, ``[*batch]`` in float32 (float64 for float64). Gradients are those of the log-probabilities of the
        tokens found, and of entropy and logsumexp.

    Raises:
        ValueError: k out of range, and whatever ``logits_logprobs`` refuses.
        NotImplementedError: a backend that does not exist or cannot run here; the message lists those that can.

    >>> result = topk_logprobs(torch.tensor([[0.0, 1.0, 1.0, -1.0]]).log_softmax(-1), 2)
    >>> result.tokens.tolist(), [round(x, 4) for x in result.logprobs[0].tolist()]
    ([[1, 2]], [-0.9176, -0.9176])
    """
    vocabulary = logits.shape[-1]
    checked(k, vocabulary)
    batch = logits.shape[:-1]
    rows = rows_of(
        batch,
        vocabulary,
        logits.dtype,
        torch.empty(*batch, 0, dtype=torch.int64, device=logits.device),
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        allowed_tokens=allowed_tokens,
        mask=mask,
    )
    flat = logits.detach().reshape(len(rows.inverse), vocabulary)
    tokens = _topk_ids(flat, rows.allowed_tokens, rows.mask, k, backend).view(*batch, k)
    values = logits_logprobs(
        logits,
        tokens,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        allowed_tokens=allowed_tokens,
        mask=mask,
        backend=backend,
    )
    return TopkLogprobs(tokens, *values)


def checked(k: int, vocabulary: int | None) -> None:
    """Raise for a k that no row can have; ``vocabulary`` is None where it is not known here."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1 or (vocabulary is not None and k > vocabulary):
        raise ValueError(f"k must be an integer in 1 … {'V' if vocabulary is None else vocabulary}, got {k}")


@torch.library.custom_op("rl_kernels::topk_ids", mutates_args=())
def _topk_ids(
    logits: Tensor, allowed_tokens: Tensor | None, mask: Tensor | None, k: int, backend: str | None
) -> Tensor:
    return implementation("topk_logprobs", logits.device.type, backend).ids(logits, allowed_tokens, mask, k)


@_topk_ids.register_fake
def _(logits, allowed_tokens, mask, k, backend):
    return torch.empty(len(logits), k, dtype=torch.int64, device=logits.device)
