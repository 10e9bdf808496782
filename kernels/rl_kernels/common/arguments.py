"""What the operations take, checked and brought to N rows of logits for the backends, whatever the batch's shape."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

# The parameters of a custom operation that stand for a `Rows` and a `Problem`, in the order of their fields: PyTorch
# passes tensors and numbers to a custom operation, but no tuple of both.
ROWS = "Tensor tokens, Tensor inv_temperature, float? softcap, Tensor? allowed_tokens, Tensor? mask"
PROBLEM = f"Tensor hidden, Tensor weight, Tensor? bias, {ROWS}, SymInt start"
# With a mask the host waits to know how many rows count, which a CUDA graph cannot capture.
UNCAPTURED = (torch.Tag.cudagraph_unsafe,)
OF_ROWS, OF_PROBLEM = 5, 9
"""How many parameters those are."""


class Rows(NamedTuple):
    """How each row of logits is scored, contiguous.

    ``tokens`` int64 [N, K]; ``inv_temperature`` [N], the logit scale over the temperature in the dtype of the
    arithmetic; ``allowed_tokens`` bool [N, V] or ids [N, S]; ``mask`` bool [N], False for a row that is left out.
    """

    tokens: Tensor
    inv_temperature: Tensor
    softcap: float | None
    allowed_tokens: Tensor | None
    mask: Tensor | None

    def take(self, index: slice | Tensor) -> "Rows":
        """Some of the rows."""
        allowed, mask = (None if x is None else x[index] for x in (self.allowed_tokens, self.mask))
        return Rows(self.tokens[index], self.inv_temperature[index], self.softcap, allowed, mask)


class Problem(NamedTuple):
    """A linear head and its rows: ``hidden`` [N, H]; ``weight`` [V, H] and ``bias`` [V], from token ``start`` on.

    The same fields, flat, are the first parameters of a custom operation.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    rows: Rows
    start: int

    def flat(self) -> tuple[Any, ...]:
        """As a custom operation takes it."""
        return self.hidden, self.weight, self.bias, *self.rows, self.start

    @classmethod
    def of(cls, flat: tuple[Any, ...]) -> "Problem":
        """As the custom operation's other side takes it."""
        hidden, weight, bias, *rows, start = flat
        return cls(hidden, weight, bias, Rows(*rows), start)


def rows_of(
    batch: torch.Size,
    vocab_size: int,
    dtype: torch.dtype,
    tokens: Tensor,
    *,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
) -> Rows:
    """Checked rows; ``dtype`` is the logits'. No value of a tensor is read, so the host never waits for the device."""
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
    if not isinstance(temperature, Tensor):
        # Filled on the device: a tensor of a Python number would be a copy, for which the host waits.
        temperature = torch.full((), float(temperature), dtype=exact, device=tokens.device)
    inv_temperature = logit_scale / temperature.to(device=tokens.device, dtype=exact)
    tokens = tokens.reshape(count, 1 if tokens.shape == batch else tokens.shape[-1]).long().contiguous()
    if mask is not None:
        mask = mask.reshape(count).contiguous()
        # Labels of left out rows may be no token ids, as −100, and backends gather at the ids of all rows.
        tokens = tokens.masked_fill(~mask[:, None], 0)
    return Rows(
        tokens,
        inv_temperature.expand(batch).reshape(count).contiguous(),
        # cap·tanh(scale·z/cap) = scale·c·tanh(z/c) with c = cap/scale: backends know one factor only, after the cap.
        None if softcap is None else softcap / logit_scale,
        None if allowed_tokens is None else _allowed(allowed_tokens, batch, vocab_size),
        mask,
    )


def _allowed(allowed_tokens: Tensor, batch: torch.Size, vocab_size: int) -> Tensor:
    count = batch.numel()
    if allowed_tokens.dtype == torch.bool:
        if allowed_tokens.shape not in ((vocab_size,), (*batch, vocab_size)):
            raise ValueError(
                f"a bool allowed_tokens must be {(vocab_size,)} or {(*batch, vocab_size)}, "
                f"got {tuple(allowed_tokens.shape)}"
            )
        return allowed_tokens.expand(*batch, vocab_size).reshape(count, vocab_size)
    if allowed_tokens.is_floating_point() or allowed_tokens.is_complex():
        raise ValueError(f"allowed_tokens must be bool or token ids, got {allowed_tokens.dtype}")
    if allowed_tokens.shape[:-1] != batch:
        raise ValueError(f"allowed_tokens of token ids must be {(*batch, 'S')}, got {tuple(allowed_tokens.shape)}")
    return allowed_tokens.reshape(count, allowed_tokens.shape[-1]).long()
