"""vLLM's int8 layers on a CPU: oneDNN's, with their scales kept where oneDNN reads them.

vLLM 0.32 gives oneDNN the address of a layer's scales and keeps no reference. A weight update makes new ones, copies
their values elsewhere and frees them: from then on the layer computes with whatever comes to lie there, mostly NaN.

On a CPU with AMX vLLM takes another kernel, which refuses float32 activations and packs the weights anew.
"""

# pyright: reportMissingImports=false

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch

Kept = Literal["kept", "mended", "missing", "no such layers"]
_NAME = "create_onednn_scaled_mm"


def install() -> None:
    """Let every int8 layer hold its scales itself, in this process; again has no effect."""
    import vllm._custom_ops as operations

    create = getattr(operations, _NAME, None)
    if create is not None and not isinstance(create, _Keeping):
        setattr(operations, _NAME, _Keeping(create))
    _take_onednn()


def _take_onednn() -> None:
    """Let int8 layers be oneDNN's, also where the CPU has AMX."""
    try:
        from vllm.model_executor.kernels.linear.scaled_mm import cpu as kernels
    except ImportError:  # a build without kernels for CPUs
        return
    asked = kernels.check_cpu_sgl_kernel
    if not hasattr(asked, "of_rl_fn"):

        @functools.wraps(asked)
        def without_int8(n: int, k: int, dtype: torch.dtype) -> bool:
            return dtype != torch.int8 and asked(n, k, dtype)

        without_int8.of_rl_fn = True  # type: ignore[attr-defined]
        kernels.check_cpu_sgl_kernel = without_int8


def state() -> Kept:
    """Whether scales stay where oneDNN reads them, found out with a layer of this process.

    "mended": vLLM keeps them itself, and ``install`` is not needed any more. "missing": they dangle.
    """
    import vllm._custom_ops as operations

    create = getattr(operations, _NAME, None)
    if create is None or not hasattr(torch.ops._C, f"{_NAME}_handler"):
        return "no such layers"
    keeping = isinstance(create, _Keeping)
    if not _borrows(create.create if keeping else create, operations):
        return "mended"
    return "missing" if _borrows(create, operations) else "kept"


class _Keeping:
    """Makes the same layers, of scales that nobody else has and that live as long as the layer."""

    def __init__(self, create: Callable[..., Any]) -> None:
        self.create = create
        functools.update_wrapper(self, create)

    def __call__(self, weight: torch.Tensor, weight_scales: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        scales = weight_scales.detach().clone()
        layer = self.create(weight, scales, *arguments, **options)
        layer.rl_fn_scales = scales
        return layer


def _borrows(create: Callable[..., Any], operations: Any) -> bool:
    """Whether a layer reads its scales from memory that it does not hold.

    The scales are changed and not freed, so that nothing here reads memory that is gone.
    """
    scales = torch.ones(8, 1)
    holders = _holders(scales)
    layer = create(torch.ones(8, 16, dtype=torch.int8).T, scales, torch.float32, True, False, 32)
    if _holders(scales) > holders:
        return False
    codes, token_scales, _ = operations.onednn_scaled_int8_quant(torch.ones(1, 16), None, None, True)
    found = []
    for scale in (1.0, 2.0):
        scales.fill_(scale)
        out = torch.empty(1, 8)
        operations.onednn_scaled_mm(layer, codes, out, token_scales, None, None, None)
        found.append(out)
    return not torch.equal(*found)


def _holders(tensor: torch.Tensor) -> int:
    """How many references there are to a tensor's memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
