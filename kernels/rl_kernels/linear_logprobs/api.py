"""One signature for all backends of ``linear_logprobs``."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_kernels.backends import implementation
from rl_kernels.common.arguments import OF_PROBLEM, PROBLEM, UNCAPTURED, Problem, Rows, rows_of
from rl_kernels.common.row_state import RowState, finalize_row_state, merge_all
from rl_kernels.linear_logprobs.backward import Gradients, Needed
from rl_kernels.logits_logprobs import TokenLogprobs

# Bytes with which the GEMMs of a block are nearly as fast as large ones. The backward's blocks are larger, since each
# also reads and writes gradients again.
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

    z = hidden·weightᵀ + bias;  x = softcap·tanh(logit_scale·z/softcap)/temperature, over the allowed tokens;
    lse = log Σᵥ exp xᵥ;  logprob = x[token] − lse;  entropy = −Σᵥ pᵥ log pᵥ.

    Beyond the results the forward needs 64 MiB. The backward computes each block again; beyond the gradients (the
    weight's once more in float32) it needs ``workspace`` bytes. Neither grows with the number of tokens. A gradient
    that is not needed, as of a frozen weight, is neither computed nor allocated.

    Args:
        hidden: ``[*batch, H]`` last hidden states, any float dtype.
        weight: ``[V, H]`` output embedding; with ``group`` this rank's rows of it, of any number.
        tokens: ``[*batch]`` integer token ids in the whole vocabulary, or ``[*batch, K]`` for K tokens a row.
        bias: ``[V]``, or this rank's part of it.
        temperature: one positive number, or one for each row (``[*batch]``), whose values are not checked.
        logit_scale: the model's own factor of the logits (Cohere's, Granite's), before the cap.
        softcap: Gemma's logit soft cap, or None.
        allowed_tokens: those a truncated sampler may draw: ids ``[*batch, S]`` in any order filled with −1, or
            bool ``[*batch, V]`` or ``[V]``. Any other token has log-probability −inf and takes no gradient.
        mask: bool ``[*batch]``; where False the row is not computed, its results are 0 and it has no gradient.
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
        # Liger has a backward of its own, and is therefore called outside the custom operation.
        run = implementation("linear_logprobs", hidden.device.type, backend).token_logprobs
        options = {"bias": bias, "softcap": softcap, "allowed_tokens": allowed_tokens, "group": group, "mask": mask}
        return run(hidden, weight, tokens, temperature=temperature, logit_scale=logit_scale, **options)
    problem = Problem(hidden.reshape(batch.numel(), hidden.shape[-1]), weight, bias, rows, start)
    name = None if group is None else group.group_name
    logprobs, entropy, logsumexp = _forward(*problem.flat(), name, workspace, backend)
    return TokenLogprobs(logprobs.view(tokens.shape), entropy.view(batch), logsumexp.view(batch))


def default_workspace(hidden: Tensor) -> int:
    """The workspace where the caller gives none."""
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
    """Raise where the model's arrays do not fit each other, or do not fit a vocabulary in shards."""
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
    """The process group of a name, which is how a custom operation is told the group."""
    return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore


def from_every_rank(x: Tensor, group: str) -> list[Tensor]:
    """Every rank's ``x``, all of one shape, in the order of ranks."""
    ranks = ranks_of(group)
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size(ranks))]
    dist.all_gather(everyone, x, group=ranks)
    return everyone


def gathered(state: RowState, group: str) -> RowState:
    """The state of the whole vocabulary: the ranks' states merged in the order of ranks, to the same bits on each."""
    mine = torch.cat([field.view(len(field), -1) for field in state], 1)
    return merge_all([RowState(x[:, 0], x[:, 1], x[:, 2], x[:, 3:]) for x in from_every_rank(mine, group)])


_HOW = "str? group, SymInt workspace, str? backend"
_TENSORS = "(Tensor, Tensor, Tensor)"


@torch.library.custom_op(
    "rl_kernels::linear_logprobs",
    mutates_args=(),
    schema=f"({PROBLEM}, {_HOW}) -> {_TENSORS}",
    tags=UNCAPTURED,
)
def _forward(*arguments):
    problem, (group, workspace, backend) = Problem.of(arguments[:OF_PROBLEM]), arguments[OF_PROBLEM:]
    run = implementation("linear_logprobs", problem.hidden.device.type, backend).forward
    state = run(problem, min(workspace, FORWARD_WORKSPACE))
    results = finalize_row_state(state if group is None else gathered(state, group))
    if problem.rows.mask is None:
        return results
    left_out = ~problem.rows.mask
    logprobs, entropy, logsumexp = results
    return (
        logprobs.masked_fill_(left_out[:, None], 0.0),
        entropy.masked_fill_(left_out, 0.0),
        logsumexp.masked_fill_(left_out, 0.0),
    )


@_forward.register_fake
def _(*arguments):
    rows = Problem.of(arguments[:OF_PROBLEM]).rows
    like = rows.inv_temperature
    return like.new_empty(rows.tokens.shape), torch.empty_like(like), torch.empty_like(like)


@torch.library.custom_op(
    "rl_kernels::linear_logprobs_backward",
    mutates_args=(),
    schema=f"({PROBLEM}, {_HOW}, Tensor[] outputs, Tensor[] cotangents, bool[] needed) -> {_TENSORS}",
    tags=UNCAPTURED,
)
def _backward(*arguments):
    problem, how = Problem.of(arguments[:OF_PROBLEM]), arguments[OF_PROBLEM:]
    group, workspace, backend, outputs, cotangents, needed = how
    run = implementation("linear_logprobs", problem.hidden.device.type, backend).backward
    found = run(problem, workspace, tuple(outputs), tuple(cotangents), Needed(*needed))
    if group is not None and found[0] is not None:
        dist.all_reduce(found[0], group=ranks_of(group))
    # A custom operation returns tensors only: an empty one stands for a gradient that is not needed.
    return tuple(problem.weight.new_empty(0) if x is None else x for x in found)


@_backward.register_fake
def _(*arguments):
    needed, weight = arguments[-1], arguments[1]
    pairs = zip(arguments[:3], needed, strict=True)
    return tuple(torch.empty_like(x) if x is not None and wish else weight.new_empty(0) for x, wish in pairs)


def save_for_backward(ctx: Any, problem: Problem, outputs: tuple[Tensor, ...], how: tuple[Any, ...]) -> None:
    """Keep what `differentiate` needs; ``how`` is (group, workspace, backend)."""
    hidden, weight, bias, (tokens, inv_temperature, softcap, allowed_tokens, mask), start = problem
    ctx.save_for_backward(hidden, weight, bias, tokens, inv_temperature, allowed_tokens, mask, *outputs)
    ctx.numbers, ctx.how = (softcap, start), how


def differentiate(ctx: Any, cotangents: tuple[Tensor, ...]) -> Gradients:
    """The gradients of hidden states, weight and bias that are needed, from what `save_for_backward` kept."""
    hidden, weight, bias, tokens, inv_temperature, allowed_tokens, mask, *outputs = ctx.saved_tensors
    softcap, start = ctx.numbers
    problem = Problem(hidden, weight, bias, Rows(tokens, inv_temperature, softcap, allowed_tokens, mask), start)
    needed = [bool(wish) for wish in ctx.needs_input_grad[:3]]
    found = _backward(*problem.flat(), *ctx.how, outputs, list(cotangents), needed)
    d_hidden, d_weight, d_bias = (x if wish else None for x, wish in zip(found, needed, strict=True))
    return d_hidden, d_weight, d_bias


def _setup(ctx, inputs, output):
    save_for_backward(ctx, Problem.of(inputs[:OF_PROBLEM]), output, inputs[OF_PROBLEM:])


def _differentiate(ctx, *cotangents):
    return *differentiate(ctx, cotangents), *[None] * 9


_forward.register_autograd(_differentiate, setup_context=_setup)
