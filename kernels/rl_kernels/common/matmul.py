"""Matrix products in float32 (float64 for float64) of operands in any float dtype, by cuBLAS or hipBLASLt on a GPU."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Native(NamedTuple):
    """Whether torch multiplies half-precision matrices into a float32 result, and adds that to a float32 matrix,
    without wider copies of the operands.
    """

    matmul: bool
    accumulate: bool


def matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in ``dtype``, with no intermediate rounding to less.

    A GPU multiplies half-precision numbers exactly into a float32 accumulator. Where torch returns that accumulator,
    the operands stay narrow; elsewhere they are widened first. Autocast, which would narrow them again, is off.
    """
    with torch.autocast(a.device.type, enabled=False):
        if dtype == torch.float32 and native(a, b).matmul:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.mm(a.to(dtype), b.to(dtype))


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, with no intermediate rounding to less than the dtype of ``total``."""
    with torch.autocast(a.device.type, enabled=False):
        own = native(a, b) if total.dtype == torch.float32 else Native(False, False)
        if own.accumulate:
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        elif own.matmul:
            total += torch.mm(a, b, out_dtype=torch.float32)
        else:
            total.addmm_(a.to(total.dtype), b.to(total.dtype))


def native(a: Tensor, b: Tensor) -> Native:
    """What torch can do with two such matrices on their device."""
    if not a.is_cuda or a.dtype != b.dtype or a.dtype not in (torch.bfloat16, torch.float16):
        return Native(False, False)
    return _tried(a.device, a.dtype)


@cache
def _tried(device: torch.device, dtype: torch.dtype) -> Native:
    """Found out once by trying: some builds for ROCm refuse the matmul, older ones the float32 sum."""
    ones, total = torch.ones(16, 16, device=device, dtype=dtype), torch.ones(16, 16, device=device)
    return Native(
        _gives(16.0, lambda: torch.mm(ones, ones, out_dtype=torch.float32)),
        _gives(17.0, lambda: torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)),
    )


def _gives(value: float, call: Callable[[], Tensor]) -> bool:
    try:
        return bool((call() == value).all())
    except torch.OutOfMemoryError:
        # A full memory says nothing of what torch can do, and the result of the trial is cached.
        raise
    except (RuntimeError, TypeError):
        return False
