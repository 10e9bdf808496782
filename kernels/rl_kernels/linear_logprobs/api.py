"""One signature for all backends of ``linear_logprobs``."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_kernels.backends import implementation
from rl_kernels.common.arguments import rows_of
from rl_kernels.common.row_state import RowState, finish, merge_all
from rl_kernels.logits_logprobs import TokenLogprobs

# Enough for products to be nearly as fast as large ones: a backward's block also reads and writes gradients again.
FORWARD_WORKSPACE, GPU_WORKSPACE, CPU_WORKSPACE = 64 << 20, 512 << 20, 64 << 20


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
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
) -> TokenLogprobs:
    """``logits_logprobs`` of ``hidden @ weight.T + bias`` without the logits: they exist a block at a time, in float32.

    z = hidden·weightᵀ + bias;  x = softcap·tanh(logit_scale·z/softcap)/temperature, over the kept set;
    lse = log Σᵥ exp xᵥ;  logprob = x[token] − lse;  entropy = −Σᵥ pᵥ log pᵥ.

    Beyond its results it needs 64 MiB, and its backward, which computes each block again, beyond the gradients (that of
    the weight once more in float32) ``workspace`` bytes: however many rows there are.

    Args:
        hidden: ``[*batch, H]`` last hidden states, any float dtype.
        weight: ``[V, H]`` output embedding; with ``group`` this rank's rows of it, of any number.
        tokens: ``[*batch]`` integer token ids in the whole vocabulary, or ``[*batch, K]`` for K tokens a row.
        bias: ``[V]``, or this rank's part of it.
        temperature: one positive number, or one for each row (``[*batch]``), whose values are not checked.
        logit_scale: the model's own factor of the logits (Cohere's, Granite's), before the cap.
        softcap: Gemma's logit soft cap, or None.
        allowed_tokens: the kept set of a truncated sampler: ids ``[*batch, S]`` in any order with −1 for a shorter set,
            or bool ``[*batch, V]`` or ``[V]``. A token outside it has log-probability −inf and takes no gradient.
        mask: bool ``[*batch]``; a row where it is False is not computed, has results 0 and no gradient.
        start: id of the weight's first row, for a vocabulary in shards.
        group: the torch.distributed process group whose ranks hold the shards; every rank gets every result, and the
            gradient of ``hidden`` is summed over the ranks.
        workspace: bytes for blocks of logits, of which the forward takes 64 MiB at most; None is 512 MiB on a GPU and
            64 MiB elsewhere.
        backend: ``"triton"``, ``"torch"`` or ``"reference"``; on request also ``"triton_matmul"``, ``"gluon"`` and
            ``"liger"`` of ``rl_kernels.experimental``. None takes the best supported one.

    Returns:
        ``TokenLogprobs(logprobs, entropy, logsumexp)``: shaped as ``tokens``, ``[*batch]``, ``[*batch]``, in float32
        (float64 for float64).

    Raises:
        ValueError: shapes that do not fit, tokens that are not integers, a temperature (as a number), scale, softcap or
            workspace that is not positive.
        NotImplementedError: a backend that does not exist or cannot run here; the message lists those that can.

    >>> hidden, weight = torch.tensor([[1.0, 2.0]]), torch.zeros(4, 2)
    >>> [round(float(value), 4) for value in linear_logprobs(hidden, weight, torch.tensor([3]))]
    [-1.3863, 1.3863, 1.3863]
    """
    workspace = default_workspace(hidden) if workspace is None else workspace
    checked_model(hidden, weight, bias, allowed_tokens, start, group, workspace)
    batch = hidden.shape[:-1]
    rows = rows_of(
        batch,
        len(weight),
        torch.float64 if hidden.dtype == torch.float64 else torch.float32,
        tokens,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        allowed_tokens=allowed_tokens,
        mask=mask,
    )
    if backend == "liger":
        # Liger differentiates itself, so that it is no backend of the custom operation.
        options = {"bias": bias, "softcap": softcap, "allowed_tokens": allowed_tokens, "group": group, "mask": mask}
        run = implementation("linear_logprobs", hidden.device.type, backend).token_logprobs
        return run(hidden, weight, tokens, temperature=temperature, logit_scale=logit_scale, **options)
    logprobs, entropy, logsumexp = _forward(
        hidden.reshape(len(rows.inverse), hidden.shape[-1]),
        weight,
        bias,
        rows.tokens,
        rows.inverse,
        rows.softcap,
        rows.allowed_tokens,
        rows.mask,
        start,
        None if group is None else group.group_name,
        workspace,
        backend,
    )
    return TokenLogprobs(logprobs.view(tokens.shape), entropy.view(batch), logsumexp.view(batch))


def default_workspace(hidden: Tensor) -> int:
    """Bytes for blocks where nobody said how many."""
    return GPU_WORKSPACE if hidden.is_cuda else CPU_WORKSPACE


def checked_model(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    allowed_tokens: Tensor | None,
    start: int,
    group: Any,
    workspace: int,
) -> None:
    """Raise for arguments that fit neither each other nor a vocabulary in shards."""
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
        raise ValueError(f"weight must be (V, {hidden.shape[-1]}), got {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    if not workspace > 0:
        raise ValueError(f"workspace must be a positive number of bytes, got {workspace}")
    if group is None and start:
        raise ValueError(f"start is {start}, but without a group the weight is the whole vocabulary")
    if group is not None and allowed_tokens is not None and allowed_tokens.dtype == torch.bool:
        raise ValueError("with a group give allowed_tokens as token ids: a bool one has the length of the vocabulary")


def ranks_of(name: str) -> Any:
    """The process group: a custom operation takes its name."""
    return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore


def from_every_rank(x: Tensor, group: str) -> list[Tensor]:
    """Every rank's ``x``, all of one shape, in the order of ranks."""
    ranks = ranks_of(group)
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size(ranks))]
    dist.all_gather(everyone, x, group=ranks)
    return everyone


def gathered(state: RowState, group: str) -> RowState:
    """The state of the whole vocabulary: every rank's, merged in the order of ranks, so all have the same bits."""
    mine = torch.cat([field.view(len(field), -1) for field in state], 1)
    return merge_all([RowState(x[:, 0], x[:, 1], x[:, 2], x[:, 3:]) for x in from_every_rank(mine, group)])


@torch.library.custom_op("rl_kernels::linear_logprobs", mutates_args=())
def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    inverse: Tensor,
    softcap: float | None,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
    start: int,
    group: str | None,
    workspace: int,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    run = implementation("linear_logprobs", hidden.device.type, backend).forward
    space = min(workspace, FORWARD_WORKSPACE)
    state = run(hidden, weight, bias, tokens, inverse, softcap, allowed_tokens, mask, start, space)
    results = finish(state if group is None else gathered(state, group))
    if mask is None:
        return results
    left_out = ~mask
    logprobs, entropy, logsumexp = results
    return (
        logprobs.masked_fill_(left_out[:, None], 0.0),
        entropy.masked_fill_(left_out, 0.0),
        logsumexp.masked_fill_(left_out, 0.0),
    )


@_forward.register_fake
def _(hidden, weight, bias, tokens, inverse, softcap, allowed_tokens, mask, start, group, workspace, backend):
    return inverse.new_empty(tokens.shape), torch.empty_like(inverse), torch.empty_like(inverse)


@torch.library.custom_op("rl_kernels::linear_logprobs_backward", mutates_args=())
def _backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    inverse: Tensor,
    softcap: float | None,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
    start: int,
    group: str | None,
    workspace: int,
    outputs: list[Tensor],
    cotangents: list[Tensor],
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    run = implementation("linear_logprobs", hidden.device.type, backend).backward
    d_hidden, d_weight, d_bias = run(
        hidden,
        weight,
        bias,
        tokens,
        inverse,
        softcap,
        allowed_tokens,
        mask,
        start,
        workspace,
        tuple(outputs),
        tuple(cotangents),
    )
    if group is not None:
        dist.all_reduce(d_hidden, group=ranks_of(group))
    # A custom operation returns tensors only: an empty one stands for the gradient of no bias.
    return d_hidden, d_weight, weight.new_empty(0) if d_bias is None else d_bias


@_backward.register_fake
def _(
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
    outputs,
    cotangents,
    backend,
):
    return (
        torch.empty_like(hidden),
        torch.empty_like(weight),
        weight.new_empty(0) if bias is None else torch.empty_like(bias),
    )


def _setup(ctx, inputs, output):
    hidden, weight, bias, tokens, inverse, softcap, allowed_tokens, mask, start, group, workspace, backend = inputs
    ctx.save_for_backward(hidden, weight, bias, tokens, inverse, allowed_tokens, mask, *output)
    ctx.settings = softcap, start, group, workspace, backend


def _differentiate(ctx, *cotangents):
    hidden, weight, bias, tokens, inverse, allowed_tokens, mask, *outputs = ctx.saved_tensors
    softcap, start, group, workspace, backend = ctx.settings
    d_hidden, d_weight, d_bias = _backward(
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
        outputs,
        list(cotangents),
        backend,
    )
    return d_hidden, d_weight, None if bias is None else d_bias, *[None] * 9


_forward.register_autograd(_differentiate, setup_context=_setup)
