"""One signature for all backends of ``topk_logprobs`` and ``linear_topk_logprobs``.

From logits: the ids, without a gradient, then ``logits_logprobs`` of k tokens a row. From hidden states: one sweep
finds the ids and the row's state; the backward is ``linear_logprobs``'s.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_kernels.backends import implementation
from rl_kernels.common.arguments import rows_of
from rl_kernels.common.row_state import finish, finite
from rl_kernels.common.scaling import scaled
from rl_kernels.linear_logprobs.api import (
    FORWARD_WORKSPACE,
    checked_model,
    default_workspace,
    from_every_rank,
    gathered,
)
from rl_kernels.logits_logprobs import logits_logprobs
from rl_kernels.topk_logprobs.largest import NOTHING, merged


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


def linear_topk_logprobs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    allowed_tokens: Tensor | None = None,
    mask: Tensor | None = None,
    start: int = 0,
    group: Any = None,
    workspace: int | None = None,
    backend: str | None = None,
) -> TopkLogprobs:
    """``topk_logprobs`` of ``hidden @ weight.T + bias`` without the logits: they exist a block at a time, in float32.

    Beyond results, gradients and k numbers a row it needs ``workspace`` bytes, however many rows there are. The k best
    of each block join those of the blocks before it, and of the other ranks; the block's part of the logsumexp is taken
    at the same time, so that the forward computes each logit once.

    Args:
        hidden: ``[*batch, H]`` last hidden states, any float dtype.
        weight: ``[V, H]`` output embedding; with ``group`` this rank's rows of it, of any number.
        k: in 1 … V, with ``group`` V being the ranks' together. Where fewer tokens can be drawn, the lowest other ids
            follow, with log-probability −inf.
        bias: ``[V]``, or this rank's part of it.
        temperature: one positive number, or one for each row (``[*batch]``), whose values are not checked.
        logit_scale: the model's own factor of the logits, before the cap.
        softcap: Gemma's logit soft cap, or None.
        allowed_tokens: the kept set of a truncated sampler, as ``linear_logprobs`` takes it.
        mask: bool ``[*batch]``; a row where it is False is not computed: its ids, results and gradient are 0.
        start: id of the weight's first row, for a vocabulary in shards.
        group: the torch.distributed process group whose ranks hold the shards, in any order; every rank gets every
            result, and the gradient of ``hidden`` is summed over the ranks.
        workspace: as in ``linear_logprobs``.
        backend: ``"triton"``, ``"torch"`` or ``"reference"``. None takes the best supported one.

    Returns:
        ``TopkLogprobs(tokens, logprobs, entropy, logsumexp)``, as ``topk_logprobs``; differentiable in hidden states,
        weight and bias.

    Raises:
        ValueError: k out of range, and whatever ``linear_logprobs`` refuses.
        NotImplementedError: a backend that does not exist or cannot run here; the message lists those that can.

    >>> hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [2.0], [1.0]])
    >>> result = linear_topk_logprobs(hidden, weight, 2)
    >>> result.tokens.tolist(), [round(x, 4) for x in result.logprobs[0].tolist()]
    ([[1, 2]], [-0.4076, -1.4076])
    """
    checked(k, len(weight) if group is None else None)
    workspace = default_workspace(hidden) if workspace is None else workspace
    checked_model(hidden, weight, bias, allowed_tokens, start, group, workspace)
    batch = hidden.shape[:-1]
    rows = rows_of(
        batch,
        len(weight),
        torch.float64 if hidden.dtype == torch.float64 else torch.float32,
        torch.empty(*batch, 0, dtype=torch.int64, device=hidden.device),
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        allowed_tokens=allowed_tokens,
        mask=mask,
    )
    logprobs, entropy, logsumexp, tokens = _forward(
        hidden.reshape(len(rows.inverse), hidden.shape[-1]),
        weight,
        bias,
        rows.inverse,
        rows.softcap,
        rows.allowed_tokens,
        rows.mask,
        k,
        start,
        None if group is None else group.group_name,
        workspace,
        backend,
    )
    return TopkLogprobs(tokens.view(*batch, k), logprobs.view(*batch, k), entropy.view(batch), logsumexp.view(batch))


@torch.library.custom_op("rl_kernels::linear_topk_logprobs", mutates_args=())
def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inverse: Tensor,
    softcap: float | None,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
    k: int,
    start: int,
    group: str | None,
    workspace: int,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    run = implementation("topk_logprobs", hidden.device.type, backend).forward
    space = min(workspace, FORWARD_WORKSPACE)
    state, values, tokens = run(hidden, weight, bias, inverse, softcap, allowed_tokens, mask, k, start, space)
    if group is not None:
        state = gathered(state, group)
        every = zip(from_every_rank(values, group), from_every_rank(tokens, group), strict=True)
        values, tokens = merged(list(every), k)
        # Every rank that is too small asks, and where all together are, all of them raise.
        if len(weight) < k and bool((tokens == NOTHING).any() if mask is None else (tokens[mask] == NOTHING).any()):
            raise ValueError(f"k is {k}, more than the vocabulary of the group's shards together")
    _, entropy, logsumexp = finish(state)
    logprobs = scaled(values, inverse, softcap) - finite(logsumexp)[:, None]
    if mask is None:
        return logprobs, entropy, logsumexp, tokens
    left_out = ~mask
    return (
        logprobs.masked_fill(left_out[:, None], 0.0),
        entropy.masked_fill(left_out, 0.0),
        logsumexp.masked_fill(left_out, 0.0),
        tokens.masked_fill(left_out[:, None], 0),
    )


@_forward.register_fake
def _(hidden, weight, bias, inverse, softcap, allowed_tokens, mask, k, start, group, workspace, backend):
    logprobs = inverse.new_empty(len(inverse), k)
    return logprobs, torch.empty_like(inverse), torch.empty_like(inverse), torch.empty_like(logprobs, dtype=torch.int64)


def _setup(ctx, inputs, output):
    hidden, weight, bias, inverse, softcap, allowed_tokens, mask, _, start, group, workspace, backend = inputs
    *values, tokens = output
    ctx.mark_non_differentiable(tokens)
    ctx.save_for_backward(hidden, weight, bias, tokens, inverse, allowed_tokens, mask, *values)
    ctx.settings = softcap, start, group, workspace, backend


def _differentiate(ctx, *cotangents):
    hidden, weight, bias, tokens, inverse, allowed_tokens, mask, *values = ctx.saved_tensors
    softcap, start, group, workspace, backend = ctx.settings
    d_hidden, d_weight, d_bias = torch.ops.rl_kernels.linear_logprobs_backward(
        hidden,
        weight,
        bias,
        tokens,
        inverse,
        softcap,
        allowed_tokens,
        mask,
        start,
        group,
        workspace,
        values,
        list(cotangents[:3]),
        backend,
    )
    return d_hidden, d_weight, None if bias is None else d_bias, *[None] * 9


_forward.register_autograd(_differentiate, setup_context=_setup)
