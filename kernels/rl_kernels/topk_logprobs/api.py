"""One signature for all backends of ``topk_logprobs`` and ``linear_topk_logprobs``.

From logits: the ids, without a gradient, then ``logits_logprobs`` of k tokens a row. From hidden states: one sweep
finds the ids and the row's state; the backward is ``linear_logprobs``'s.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_kernels.backends import implementation
from rl_kernels.common.arguments import OF_PROBLEM, PROBLEM, UNCAPTURED, Problem, rows_of
from rl_kernels.common.row_state import finalize_row_state, finite
from rl_kernels.common.scaling import scaled
from rl_kernels.linear_logprobs.api import (
    FORWARD_WORKSPACE,
    checked_model,
    default_workspace,
    differentiate,
    from_every_rank,
    gathered,
    save_for_backward,
)
from rl_kernels.logits_logprobs import logits_logprobs
from rl_kernels.topk_logprobs.largest import NO_TOKEN, merged


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

    x = softcap·tanh(logit_scale·z/softcap)/temperature, over the allowed tokens;  logprob = x[id] − log Σᵥ exp xᵥ.

    The order is that of the logits, which neither cap nor temperature changes; equal logits go to the lower id, also
    where the cap saturates. What a teacher reports for distillation: ``rl_fn.top_k_distillation`` takes
    ``logprobs`` and ``tokens``.

    Args:
        logits: ``[*batch, V]`` in any float dtype; −inf marks a token that cannot be sampled.
        k: in 1 … V. Where fewer tokens can be sampled, the lowest other ids follow, with log-probability −inf.
        temperature: one positive number, or one for each row (``[*batch]``), whose values are not checked.
        logit_scale: the model's own factor of the logits, before the cap.
        softcap: Gemma's logit soft cap, or None.
        allowed_tokens: those a truncated sampler may draw, as ``logits_logprobs`` takes it.
        mask: bool ``[*batch]``; where False the row is not computed: its ids, results and gradient are 0.
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
    vocab_size = logits.shape[-1]
    checked(k, vocab_size)
    batch = logits.shape[:-1]
    rows = rows_of(
        batch,
        vocab_size,
        logits.dtype,
        torch.empty(*batch, 0, dtype=torch.int64, device=logits.device),
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        allowed_tokens=allowed_tokens,
        mask=mask,
    )
    flat = logits.detach().reshape(len(rows.inv_temperature), vocab_size)
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


def checked(k: int, vocab_size: int | None) -> None:
    """Raise for a k that no row can have; ``vocabulary`` is None where it is not known here."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1 or (vocab_size is not None and k > vocab_size):
        raise ValueError(f"k must be an integer in 1 … {'V' if vocab_size is None else vocab_size}, got {k}")


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

    The k best of each block join the k best of the blocks before, and of the other ranks. The block's part of the
    logsumexp is taken at the same time, so that the forward computes each logit once. Beyond results, gradients and k
    numbers a row it needs ``workspace`` bytes, however many rows there are.

    Args:
        hidden: ``[*batch, H]`` last hidden states, any float dtype.
        weight: ``[V, H]`` output embedding; with ``group`` this rank's rows of it, of any number.
        k: in 1 … V, with ``group`` V being the ranks' together. Where fewer tokens can be sampled, the lowest other ids
            follow, with log-probability −inf.
        bias: ``[V]``, or this rank's part of it.
        temperature: one positive number, or one for each row (``[*batch]``), whose values are not checked.
        logit_scale: the model's own factor of the logits, before the cap.
        softcap: Gemma's logit soft cap, or None.
        allowed_tokens: those a truncated sampler may draw, as ``linear_logprobs`` takes it.
        mask: bool ``[*batch]``; where False the row is not computed: its ids, results and gradient are 0.
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
    problem = Problem(hidden.reshape(batch.numel(), hidden.shape[-1]), weight, bias, rows, start)
    name = None if group is None else group.group_name
    logprobs, entropy, logsumexp, tokens = _forward(*problem.flat(), name, workspace, backend, k)
    return TopkLogprobs(tokens.view(*batch, k), logprobs.view(*batch, k), entropy.view(batch), logsumexp.view(batch))


@torch.library.custom_op(
    "rl_kernels::linear_topk_logprobs",
    mutates_args=(),
    schema=f"({PROBLEM}, str? group, SymInt workspace, str? backend, SymInt k) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=UNCAPTURED,
)
def _forward(*arguments):
    problem, (group, workspace, backend, k) = Problem.of(arguments[:OF_PROBLEM]), arguments[OF_PROBLEM:]
    weight, rows = problem.weight, problem.rows
    run = implementation("topk_logprobs", weight.device.type, backend).forward
    state, values, tokens = run(problem, k, min(workspace, FORWARD_WORKSPACE))
    mask = rows.mask
    if group is not None:
        state = gathered(state, group)
        every = zip(from_every_rank(values, group), from_every_rank(tokens, group), strict=True)
        values, tokens = merged(list(every), k)
        # A rank whose shard has k tokens knows that there are enough; where the shards together are too small, no rank
        # has, and all of them raise.
        if len(weight) < k and bool((tokens == NO_TOKEN).any() if mask is None else (tokens[mask] == NO_TOKEN).any()):
            raise ValueError(f"k is {k}, more than the vocabulary of the group's shards together")
    _, entropy, logsumexp = finalize_row_state(state)
    logprobs = scaled(values, rows.inv_temperature, rows.softcap) - finite(logsumexp)[:, None]
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
def _(*arguments):
    like, k = Problem.of(arguments[:OF_PROBLEM]).rows.inv_temperature, arguments[-1]
    logprobs = like.new_empty(len(like), k)
    return logprobs, torch.empty_like(like), torch.empty_like(like), torch.empty_like(logprobs, dtype=torch.int64)


def _setup(ctx, inputs, output):
    problem, (*how, _) = Problem.of(inputs[:OF_PROBLEM]), inputs[OF_PROBLEM:]
    *values, tokens = output
    ctx.mark_non_differentiable(tokens)
    found = problem._replace(rows=problem.rows._replace(tokens=tokens))
    save_for_backward(ctx, found, tuple(values), tuple(how))


def _differentiate(ctx, *cotangents):
    return *differentiate(ctx, cotangents[:3]), *[None] * 10


_forward.register_autograd(_differentiate, setup_context=_setup)
