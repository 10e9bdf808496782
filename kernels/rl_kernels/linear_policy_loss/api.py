"""One signature for the head with a loss on top, in two ways: two passes over the logits, or one."""

from typing import Any

import torch
from torch import Tensor

from rl_kernels.common.arguments import rows_of
from rl_kernels.linear_logprobs import linear_logprobs
from rl_kernels.linear_policy_loss.callables import Loss, split
from rl_kernels.linear_policy_loss.fused import Head, fused_head

# Larger than linear_logprobs' own: fused, all logits of a row are in memory at once.
GPU_WORKSPACE, CPU_WORKSPACE = 1 << 30, 256 << 20


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    loss: Loss,
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
    fused: bool = False,
    check: bool = True,
) -> tuple[Tensor, Any]:
    """Σ over rows of a loss of ``linear_logprobs``' results, differentiable in ``hidden``, ``weight`` and ``bias``.

    total = Σₙ ℓₙ(logprobₙ, entropyₙ, logsumexpₙ), of the N = |batch| rows in order.

    Unfused, the backward computes the logits again (8·N·V·H floating-point operations in all) and ``loss`` is called
    once, with all rows: it may be any function of them. ``fused=True`` takes the gradient during the forward, a block
    of rows at a time, whose logits are computed once (6·N·V·H) and overwritten by their gradient. ``loss`` is then
    called once a block, so it must be **token-local**: a sum in which no row's term depends on another row, divided by
    numbers that it holds already (a count of tokens of the whole batch, never ``mean()``). Ratios of sequences (GSPO),
    or means over a response whose length is not known beforehand, need ``fused=False``.

    Beyond gradients (that of the weight once more in float32) either needs ``workspace`` bytes whatever N is.

    Args:
        hidden, weight, tokens, bias, temperature, logit_scale, softcap, allowed_tokens, backend: as in
            ``linear_logprobs``.
            Fused, the backend is that of ``logits_logprobs``, and the GEMMs are torch's.
        loss: ``loss(logprobs, entropy, logsumexp, rows)`` → a scalar, or (scalar, metrics). The arrays are ``[R]``
            (``logprobs`` ``[R, K]`` for ``tokens`` of K a row) and ``rows`` is the slice of the flattened batch that
            they belong to, with which to cut the loss's own arrays. Metrics are any pytree of tensors and numbers, and
            come back detached; fused, they are added up over the blocks. Only fused may it hold nothing else that
            takes a gradient, and it is called a few times more than there are blocks if ``check``.
        mask: as in ``linear_logprobs``: rows left out have results 0 and take no gradient. ``loss`` sees zeros
            there, and must leave these rows out itself.
        start, group: as in ``linear_logprobs``; not fused.
        workspace: bytes for blocks of logits; None is ``linear_logprobs``' own, and fused 1 GiB on a GPU (each block
            adds to the whole gradient of the weight, so that few large ones are faster) and 256 MiB elsewhere.
        check: fused, compare the loss's gradient in the first block with that of the block cut in two: a difference is
            a loss whose rows interact. It shows what shows there, and waits for the device once.

    Returns:
        (total, metrics): a scalar, and what ``loss`` returns beside it, or None. Fused, the total's backward runs once,
        and multiplies gradients that are rounded to their dtype already: give float16's loss scale to ``loss``.

    Raises:
        ValueError: as in ``linear_logprobs``; a loss that is no scalar; fused, one whose rows interact or that holds
            something else that takes a gradient, and a ``group``.
        NotImplementedError: a backend that does not exist or cannot run here; the message lists those that can. Fused,
            tracing by torch.compile: call it in a function under ``torch.compiler.disable``.

    >>> hidden, weight = torch.tensor([[1.0, 2.0], [0.0, 1.0]], requires_grad=True), torch.zeros(4, 2)
    >>> def nll(logprobs, entropy, logsumexp, rows):
    ...     return -logprobs.sum() / 2
    >>> total, _ = linear_policy_loss(hidden, weight, torch.tensor([3, 1]), nll, fused=True)
    >>> round(total.item(), 4)
    1.3863
    """
    options = {
        "temperature": temperature,
        "logit_scale": logit_scale,
        "softcap": softcap,
        "allowed_tokens": allowed_tokens,
    }
    leaves = (hidden, weight, bias)
    default = GPU_WORKSPACE if hidden.is_cuda else CPU_WORKSPACE
    space = default if workspace is None else workspace
    if fused:
        if group is not None or start:
            raise ValueError("fused=True needs the whole vocabulary on every rank; with a group take fused=False")
        if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
            raise ValueError(f"weight must be (V, {hidden.shape[-1]}), got {tuple(weight.shape)}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must be {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
        if not space > 0:
            raise ValueError(f"workspace must be a positive number of bytes, got {space}")
    if fused and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves):
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        batch = hidden.shape[:-1]
        rows = rows_of(batch, len(weight), dtype, tokens, mask=mask, **options)
        flat = hidden.reshape(len(rows.inv_temperature), hidden.shape[-1])
        return fused_head(flat, weight, bias, Head(rows, loss, tokens.shape != batch, space, backend, check))
    # Without a gradient the logits are computed once in either way.
    # Autocast would round the operands that are widened on purpose.
    with torch.autocast(hidden.device.type, enabled=False):
        result = linear_logprobs(
            hidden,
            weight,
            tokens,
            bias=bias,
            mask=mask,
            start=start,
            group=group,
            workspace=workspace,
            backend=backend,
            **options,
        )
    count = result.entropy.numel()
    logprobs = result.logprobs.reshape(count, *tokens.shape[hidden.dim() - 1 :])
    return split(loss(logprobs, result.entropy.reshape(count), result.logsumexp.reshape(count), slice(0, count)))
