"""Liger's scaled cross-entropy from hidden states, on request: CuTe kernels on Hopper, written against
liger-kernel 0.8.5.

The adapter refuses what Liger lacks: bias, soft cap, allowed tokens, several targets a row, a temperature for each row,
shards, other dtypes than bfloat16, and other GPUs, where Liger itself computes in PyTorch with rounded logits. Liger
returns no logsumexp, which is NaN here, and rounds its entropy to bfloat16.
"""

import torch
from torch import Tensor

from rl_kernels.logits_logprobs import TokenLogprobs


def token_logprobs(
    hidden: Tensor, weight: Tensor, tokens: Tensor, *, temperature: float | Tensor, logit_scale: float, **options
) -> TokenLogprobs:
    """``linear_logprobs`` by Liger, differentiated by Liger. ``options`` are the other arguments of that operation."""
    mask = options.pop("mask")
    lacking = [name for name, value in options.items() if value is not None]
    if isinstance(temperature, Tensor):
        lacking.append("a tensor as temperature")
    if tokens.shape != hidden.shape[:-1]:
        lacking.append("several targets a row")
    if hidden.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        lacking.append(f"{hidden.dtype} by {weight.dtype}")
    if lacking:
        raise NotImplementedError(
            f"linear_logprobs: backend 'liger' has no {', '.join(lacking)}; backends that have: triton, torch"
        )
    if not is_hopper(hidden.device):
        raise NotImplementedError(
            "linear_logprobs: backend 'liger' has kernels for compute capability 9.0 only (elsewhere Liger computes in "
            "PyTorch with rounded logits); available: triton, torch"
        )
    counted = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    shape = tokens.shape
    logprobs, entropy = (torch.zeros(shape, dtype=torch.float32, device=hidden.device) for _ in range(2))
    logsumexp = torch.full_like(logprobs, float("nan")).masked_fill(~counted, 0.0)
    # Masked rows are not passed on: NaN in them would reach gradients as 0·NaN. Liger does not take zero rows.
    if bool(counted.any()):
        nll, uncertainty = _function().apply(
            hidden[counted],
            weight,
            tokens[counted].long(),
            float(temperature) / logit_scale,
            -100,
            1,
            True,
        )
        logprobs[counted] = -nll
        entropy[counted] = uncertainty.float()
    return TokenLogprobs(logprobs, entropy, logsumexp)


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _function():
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction  # pyright: ignore[reportMissingImports]

    return LigerFusedLinearScaledCrossEntropyFunction
