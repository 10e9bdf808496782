"""One signature for all backends of ``sample``."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_kernels.backends import implementation
from rl_kernels.sampling.cutoff import PARAMETERS, Parameters, allowed, greedy_is_top_1, key_value


class SampledTokens(NamedTuple):
    """Token ids; log p(token) under the truncated distribution they were sampled from, and under the full one at the
    same temperature; the truncated distribution's entropy in nats and number of tokens, and their ids on request.
    """

    tokens: Tensor
    logprobs: Tensor
    full_logprobs: Tensor
    entropy: Tensor
    allowed_count: Tensor
    allowed_tokens: Tensor | None = None


def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor,
    position: int | Tensor,
    return_allowed_tokens: bool = False,
    check: bool | None = None,
    backend: str | None = None,
) -> SampledTokens:
    """Draw one token a row from softmax(min_p(top_p(top_k(logits/temperature)))), each step renormalised.

    The token is a function of the row's logits, parameters, seed and position: not of its place in a batch, the batch's
    size, or the device (but for rounding). Different positions of a seed draw independently.

    Args:
        logits: ``[B, V]`` in any float dtype, taken in float32; −inf marks a token that cannot be sampled.
        temperature: ≥ 0; 0 is greedy: the largest logit, with log-probability 0 (full_logprobs too).
        top_k: ≥ 1; keep the k largest.
        top_p: in (0, 1]; keep the fewest largest whose probability is at least p. The mass is summed in units of 2⁻⁴⁰
            of the largest logit's.
        min_p: in [0, 1]; keep what is at least p times as probable as the most probable.
            These four are a number, or one a row (``[B]``) whose values are not checked. Ties go to the lower id.
        seed: the request's, 64 bits: a number or int64 ``[B]``.
        position: tells draws of one request apart, usually the token's place: a number or int64 ``[B]``.
        return_allowed_tokens: also return the ids that could be sampled, int32 ``[B, max allowed_count]``, rising, −1
            at the end: the ``allowed_tokens`` of ``logits_logprobs``. The host waits for the device.
        check: raise for logits that are NaN or +inf, or overflow over the temperature, for which the host waits for the
            device. None checks on a CPU only. Unchecked, such a row has token −1 and log-probabilities NaN.
        backend: ``"torch"``, ``"triton"`` or ``"reference"`` (rl_fn's distribution and this operation's noise); or
            where it is installed ``"flashinfer"`` or ``"aiter"`` of ``rl_kernels.experimental``, whose files state
            their limits. None takes the best supported one.

    Returns:
        ``SampledTokens``, int64 and float32 ``[B]``. A row of nothing but −inf has token −1, log-probabilities −inf,
        entropy 0 and allowed_count 0.

    Raises:
        ValueError: shapes that do not fit, parameters as numbers out of range; with ``check``, logits as above.
        NotImplementedError: a backend that does not exist or cannot run here.

    >>> result = sample(torch.tensor([[0.0, 9.0, 0.0]]), temperature=0.0, seed=1, position=0)
    >>> result.tokens.tolist(), result.logprobs.tolist(), result.allowed_count.tolist()
    ([1], [0.0], [1])
    """
    if logits.dim() != 2 or not logits.shape[1] or not logits.is_floating_point():
        raise ValueError(f"logits must be floats [B, V] with V ≥ 1, got {logits.dtype} {tuple(logits.shape)}")
    vocab_size = logits.shape[1]

    def row(name, value, dtype, valid, condition):
        if isinstance(value, Tensor):
            if value.shape not in ((), logits.shape[:1]):
                raise ValueError(f"{name} must be a number or [{len(logits)}], got {tuple(value.shape)}")
            return value.to(device=logits.device, dtype=dtype).expand(len(logits)).contiguous()
        if not valid(value):
            raise ValueError(f"{name} must be {condition}, got {value}")
        # Filled on the device: a tensor of a Python number would be a copy, for which the host waits.
        number = float(value) if dtype.is_floating_point else value
        return torch.full((len(logits),), number, dtype=dtype, device=logits.device)

    def integer(value):
        return isinstance(value, int) and -(2**63) <= value < 2**63

    k = vocab_size if top_k is None else top_k
    smallest = row("min_p", 0.0 if min_p is None else min_p, torch.float32, lambda p: 0 <= p <= 1, "in [0, 1]")
    parameters = Parameters(
        row("temperature", temperature, torch.float32, lambda t: 0 <= t < float("inf"), "finite and at least 0"),
        row("top_k", k, torch.int64, lambda k: integer(k) and k >= 1, "≥ 1"),
        row("top_p", 1.0 if top_p is None else top_p, torch.float32, lambda p: 0 < p <= 1, "in (0, 1]"),
        torch.log(smallest),
        row("seed", seed, torch.int64, integer, "an integer of 64 bits"),
        row("position", position, torch.int64, integer, "an integer of 64 bits"),
    )
    tokens, logprobs, full, entropy, count, cutoff, last, logsumexp = _sample(logits, *parameters, backend)
    undefined = logsumexp.isnan()
    if (logits.device.type == "cpu" if check is None else check) and bool(undefined.any()):
        bad = undefined.nonzero()[:, 0].tolist()
        raise ValueError(f"logits that are NaN, +inf or overflow over the temperature, in rows {bad[:8]}")
    tokens = tokens.masked_fill(undefined, -1)
    logprobs, full = (x.masked_fill(undefined, float("nan")) for x in (logprobs, full))
    ids = None
    if return_allowed_tokens:
        heat, _ = greedy_is_top_1(parameters.temperature, parameters.k)
        ids = _allowed_ids(logits, heat, cutoff, last, count)
    return SampledTokens(tokens, logprobs, full, entropy, count, ids)


def _allowed_ids(logits: Tensor, temperature: Tensor, cutoff: Tensor, last: Tensor, count: Tensor) -> Tensor:
    if not len(count):
        return logits.new_zeros((0, 0), dtype=torch.int32)
    if logits.device.type == "cpu" and type(logits) is Tensor:
        return _allowed_ids_cpu(logits, temperature, cutoff, last, count)
    rows: list[Tensor] = []
    step = max(1, (1 << 19) // logits.shape[1])
    for first in range(0, len(logits), step):
        some = slice(first, first + step)
        inside = allowed(logits[some].float() / temperature[some, None], cutoff[some], last[some])
        rows += inside.nonzero()[:, 1].int().split(count[some].tolist())
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def _allowed_ids_cpu(logits: Tensor, temperature: Tensor, cutoff: Tensor, last: Tensor, count: Tensor) -> Tensor:
    """With NumPy, which lists the places of a mask in a fifth of torch's time."""
    numbers = count.tolist()
    ids = np.empty((len(numbers), max(numbers)), np.int32)
    for row, (value, heat, end, number) in enumerate(
        zip(key_value(cutoff).numpy(), temperature, last.tolist(), numbers, strict=True)
    ):
        x = logits[row].float()
        x = (x if heat == 1 else x / heat).numpy()
        found = np.flatnonzero(x >= value)
        if len(found) > number:  # ties past the last id, or −inf where nothing is cut off
            found = found[(x[found] > value) | (found <= end)][:number]
        ids[row, : len(found)] = found
        ids[row, len(found) :] = -1
    return torch.from_numpy(ids)


@torch.library.custom_op(
    "rl_kernels::sample",
    mutates_args=(),
    schema=f"(Tensor logits, {PARAMETERS}, str? backend) -> ({', '.join(['Tensor'] * 8)})",
)
def _sample(logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *parameters, backend = arguments
    return implementation("sampling", logits.device.type, backend).forward(logits, Parameters(*parameters))


@_sample.register_fake
def _(logits, temperature, k, p, log_min_p, seed, position, backend):
    numbers = [torch.empty_like(temperature) for _ in range(4)]
    ids = [torch.empty_like(seed) for _ in range(4)]
    return ids[0], *numbers[:3], *ids[1:], numbers[3]
