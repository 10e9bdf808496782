"""What the operations take, checked and brought to rows: [N, …] for the backends, whatever the batch's shape."""

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Arguments a row, contiguous. ``tokens`` [N, K] int64; ``inverse`` [N], scale over temperature in the dtype of the
    arithmetic; ``allowed_tokens`` bool [N, V] or ids [N, S]; ``mask`` [N] bool, False for a row that is left out.
    """

    tokens: Tensor
    inverse: Tensor
    softcap: float | None
    allowed_tokens: Tensor | None
    mask: Tensor | None


def rows_of(
    batch: torch.Size,
    vocabulary: int,
    dtype: torch.dtype,
    tokens: Tensor,
    *,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
) -> Rows:
    """Checked arguments a row; ``dtype`` is the logits'. Values of tensors are not read, so that no device waits."""
    if tokens.shape != batch and tokens.shape[:-1] != batch:
        raise ValueError(
            f"tokens must have shape {tuple(batch)}, with or without a last axis of K tokens, got {tuple(tokens.shape)}"
        )
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(f"tokens must be integers, got {tokens.dtype}")
    if isinstance(temperature, Tensor):
        if temperature.dim() and temperature.shape != batch:
            raise ValueError(f"temperature must be a number or {tuple(batch)}, got {tuple(temperature.shape)}")
    elif not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if not logit_scale > 0:
        raise ValueError(f"logit_scale must be positive, got {logit_scale}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}")
    if mask is not None and (mask.shape != batch or mask.dtype != torch.bool):
        raise ValueError(f"mask must be bool {tuple(batch)}, got {mask.dtype} {tuple(mask.shape)}")
    count = batch.numel()
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    inverse = logit_scale / torch.as_tensor(temperature, dtype=exact, device=tokens.device)
    return Rows(
        tokens.reshape(count, 1 if tokens.shape == batch else tokens.shape[-1]).long().contiguous(),
        inverse.expand(batch).reshape(count).contiguous(),
        # cap·tanh(scale·z/cap) = scale·c·tanh(z/c) with c = cap/scale: backends know one factor only, after the cap.
        None if softcap is None else softcap / logit_scale,
        None if allowed_tokens is None else _support(allowed_tokens, batch, vocabulary),
        None if mask is None else mask.reshape(count).contiguous(),
    )


def _support(allowed_tokens: Tensor, batch: torch.Size, vocabulary: int) -> Tensor:
    count = batch.numel()
    if allowed_tokens.dtype == torch.bool:
        if allowed_tokens.shape not in ((vocabulary,), (*batch, vocabulary)):
            raise ValueError(
                f"a bool allowed_tokens must be {(vocabulary,)} or {(*batch, vocabulary)}, "
                f"got {tuple(allowed_tokens.shape)}"
            )
        return allowed_tokens.expand(*batch, vocabulary).reshape(count, vocabulary)
    if allowed_tokens.is_floating_point() or allowed_tokens.is_complex():
        raise ValueError(f"allowed_tokens must be bool or token ids, got {allowed_tokens.dtype}")
    if allowed_tokens.shape[:-1] != batch:
        raise ValueError(f"allowed_tokens of token ids must be {(*batch, 'S')}, got {tuple(allowed_tokens.shape)}")
    return allowed_tokens.reshape(count, allowed_tokens.shape[-1]).long()
