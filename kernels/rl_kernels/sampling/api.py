"""One signature for all backends of ``sample``."""

from typing import NamedTuple

import torch
from torch import Tensor

from rl_kernels.backends import implementation
from rl_kernels.sampling.cutoff import greedy_is_top_1, kept


class SampledTokens(NamedTuple):
    """Token ids; log p(token) under the truncated distribution they were drawn from, and under the full one at the same
    temperature; the truncated one's entropy in nats and number of entries, and their ids where they were asked for.
    """

    tokens: Tensor
    logprobs: Tensor
    full_logprobs: Tensor
    entropy: Tensor
    kept_count: Tensor
    kept: Tensor | None = None


def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor,
    position: int | Tensor,
    return_kept: bool = False,
    check: bool = True,
    backend: str | None = None,
) -> SampledTokens:
    """Draw one token a row from softmax(min_p(top_p(top_k(logits/temperature)))), each step renormalised.

    The token is a function of the row's logits, parameters, seed and position: not of its place in a batch, the batch's
    size, or the device (but for rounding). Different positions of a seed draw independently.

    Args:
        logits: ``[B, V]`` in any float dtype, taken in float32; −inf marks a token that cannot be drawn.
        temperature: ≥ 0; 0 is greedy: the largest logit, with log-probability 0 (full_logprobs too).
        top_k: ≥ 1; keep the k largest.
        top_p: in (0, 1]; keep the fewest largest whose probability is at least p. The mass is summed in units of 2⁻⁴⁰
            of the largest entry's.
        min_p: in [0, 1]; keep what is at least p times as probable as the most probable.
            These four are a number, or one a row (``[B]``) whose values are not checked. Ties go to the lower id.
        seed: the request's, 64 bits: a number or int64 ``[B]``.
        position: what else tells draws of a request apart, usually the token's place: a number or int64 ``[B]``.
        return_kept: also return the ids of the kept set ``[B, max kept_count]``, rising, −1 at the end: the
            ``allowed_tokens`` of ``logits_logprobs``. Waits for the device.
        check: raise for logits that are NaN or +inf, or overflow over the temperature. Waits for the device; without it
            such a row's results mean nothing.
        backend: ``"torch"``, ``"triton"`` or ``"reference"`` (rl_fn's distribution and this operation's noise); or
            where it is installed ``"flashinfer"`` or ``"aiter"``, whose limits ``sampling/flashinfer.py`` and
            ``aiter.py`` state. None takes the best supported one.

    Returns:
        ``SampledTokens``, with int64 and float32 entries ``[B]``. A row of nothing but −inf has token −1,
        log-probabilities −inf, entropy 0 and kept_count 0.

    Raises:
        ValueError: shapes that do not fit, parameters as numbers out of range; with ``check``, logits as above.
        NotImplementedError: a backend that does not exist or cannot run here.

    >>> result = sample(torch.tensor([[0.0, 9.0, 0.0]]), temperature=0.0, seed=1, position=0)
    >>> result.tokens.tolist(), result.logprobs.tolist(), result.kept_count.tolist()
    ([1], [0.0], [1])
    """
    if logits.dim() != 2 or not logits.shape[1] or not logits.is_floating_point():
        raise ValueError(f"logits must be floats [B, V] with V ≥ 1, got {logits.dtype} {tuple(logits.shape)}")
    vocabulary = logits.shape[1]

    def row(name, value, dtype, valid, condition):
        if isinstance(value, Tensor):
            if value.shape not in ((), logits.shape[:1]):
                raise ValueError(f"{name} must be a number or [{len(logits)}], got {tuple(value.shape)}")
        elif not valid(value):
            raise ValueError(f"{name} must be {condition}, got {value}")
        return torch.as_tensor(value, device=logits.device).to(dtype).expand(len(logits)).contiguous()

    def integer(value):
        return isinstance(value, int) and -(2**63) <= value < 2**63

    heat = row("temperature", temperature, torch.float32, lambda t: 0 <= t < float("inf"), "finite and at least 0")
    k = row("top_k", vocabulary if top_k is None else top_k, torch.int64, lambda k: integer(k) and k >= 1, "≥ 1")
    p = row("top_p", 1.0 if top_p is None else top_p, torch.float32, lambda p: 0 < p <= 1, "in (0, 1]")
    share = row("min_p", 0.0 if min_p is None else min_p, torch.float32, lambda p: 0 <= p <= 1, "in [0, 1]")
    key = row("seed", seed, torch.int64, integer, "an integer of 64 bits")
    place = row("position", position, torch.int64, integer, "an integer of 64 bits")
    tokens, logprobs, full, entropy, count, cutoff, last, logsumexp = _sample(
        logits, heat, k, p, torch.log(share), key, place, backend
    )
    if check and bool(logsumexp.isnan().any()):
        bad = logsumexp.isnan().nonzero()[:, 0].tolist()
        raise ValueError(f"logits that are NaN, +inf or overflow over the temperature, in rows {bad[:8]}")
    kept_ids = _kept_ids(logits, greedy_is_top_1(heat, k)[0], cutoff, last, count) if return_kept else None
    return SampledTokens(tokens, logprobs, full, entropy, count, kept_ids)


def _kept_ids(logits: Tensor, temperature: Tensor, cutoff: Tensor, last: Tensor, count: Tensor) -> Tensor:
    width = int(count.max()) if len(count) else 0
    ids = torch.full((len(logits), width), -1, dtype=torch.int64, device=logits.device)
    step = max(1, (1 << 22) // logits.shape[1])
    for first in range(0, len(logits), step):
        rows = slice(first, first + step)
        row, column = kept(logits[rows].float() / temperature[rows, None], cutoff[rows], last[rows]).nonzero(
            as_tuple=True
        )
        before = count[rows].cumsum(0) - count[rows]
        ids[first + row, torch.arange(len(row), device=row.device) - before[row]] = column
    return ids


@torch.library.custom_op("rl_kernels::sample", mutates_args=())
def _sample(
    logits: Tensor,
    temperature: Tensor,
    k: Tensor,
    p: Tensor,
    log_min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    run = implementation("sampling", logits.device.type, backend).forward
    return run(logits, temperature, k, p, log_min_p, seed, position)


@_sample.register_fake
def _(logits, temperature, k, p, log_min_p, seed, position, backend):
    numbers = [torch.empty_like(temperature) for _ in range(4)]
    ids = [torch.empty_like(seed) for _ in range(4)]
    return ids[0], *numbers[:3], *ids[1:], numbers[3]
