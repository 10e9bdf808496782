"""Matrix products whose result was never rounded to less than the arithmetic's precision."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Native(NamedTuple):
    """Whether a float32 product of half-precision matrices, and its addition to a float32 one, need no wider copies."""

    product: bool
    accumulate: bool


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b with a result in ``dtype`` that was never rounded to less.

    Products of half-precision numbers are exact in a GPU's float32 accumulator, where torch gives that out; elsewhere
    the operands are widened first. Autocast, which would narrow them again, is off.
    """
    with torch.autocast(a.device.type, enabled=False):
        if dtype == torch.float32 and native(a, b).product:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.mm(a.to(dtype), b.to(dtype))


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b without rounding the product to less than ``total`` has."""
    with torch.autocast(a.device.type, enabled=False):
        own = native(a, b) if total.dtype == torch.float32 else Native(False, False)
        if own.accumulate:
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        elif own.product:
            total += torch.mm(a, b, out_dtype=torch.float32)
        else:
            total.addmm_(a.to(total.dtype), b.to(total.dtype))


def native(a: Tensor, b: Tensor) -> Native:
    """What this device and torch can do with two such matrices."""
    if not a.is_cuda or a.dtype != b.dtype or a.dtype not in (torch.bfloat16, torch.float16):
        return Native(False, False)
    return _tried(a.device, a.dtype)


@cache
def _tried(device: torch.device, dtype: torch.dtype) -> Native:
    """Asked of torch itself, once: builds for ROCm have refused the product, and older ones a float32 sum."""
    ones, total = torch.ones(16, 16, device=device, dtype=dtype), torch.ones(16, 16, device=device)
    return Native(
        _gives(16.0, lambda: torch.mm(ones, ones, out_dtype=torch.float32)),
        _gives(17.0, lambda: torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)),
    )


def _gives(value: float, call: Callable[[], Tensor]) -> bool:
    try:
        return bool((call() == value).all())
    except torch.OutOfMemoryError:
        # Says nothing of what torch can do, and the answer is kept.
        raise
    except (RuntimeError, TypeError):
        return False
