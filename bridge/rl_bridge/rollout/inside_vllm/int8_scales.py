"""vLLM's int8 layers on a CPU: the same numbers on every processor, before and after an update.

vLLM 0.32 gives oneDNN the address of a layer's scales and keeps no reference. A weight update makes new ones, copies
their values elsewhere and frees them: from then on the layer computes with whatever comes to lie there, mostly NaN.

A processor without VNNI has no product of bytes that sums in 32 bits. oneDNN then sums pairs in 16 bits and cuts off
what does not fit: layers of random weights are off by a third of their largest output, without a word. Here such a
layer keeps its codes, and multiplies them as floating-point numbers that hold every sum exactly.

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
    """Let every int8 layer of this process hold its scales itself and sum exactly; again has no effect."""
    import vllm._custom_ops as operations

    create = getattr(operations, _NAME, None)
    if create is not None and not isinstance(create, _Keeping):
        setattr(operations, _NAME, _Keeping(create))
        multiply = operations.onednn_scaled_mm
        if not hasattr(multiply, "of_rl_fn"):
            operations.onednn_scaled_mm = _also_exact(multiply)
    _take_onednn()


def _take_onednn() -> None:
    """Let int8 layers be oneDNN's, also where the CPU has AMX."""
    try:
        from vllm.model_executor.kernels.linear.scaled_mm import cpu as kernels
    except ImportError:  # a build without kernels for CPUs
        return
    check = kernels.check_cpu_sgl_kernel
    if not hasattr(check, "of_rl_fn"):

        @functools.wraps(check)
        def without_int8(n: int, k: int, dtype: torch.dtype) -> bool:
            return dtype != torch.int8 and check(n, k, dtype)

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
        if saturates(self.create):
            return ExactLayer(weight, scales)
        layer = self.create(weight, scales, *arguments, **options)
        layer.rl_fn_scales = scales
        return layer


@functools.cache
def saturates(create: Callable[..., Any]) -> bool:
    """Whether oneDNN cuts sums off on this processor, found out with a layer of the largest codes."""
    import vllm._custom_ops as operations

    # While vLLM makes a model, PyTorch's default dtype is the model's.
    depth, ones = 64, functools.partial(torch.ones, dtype=torch.float32)
    scales, out = ones(8, 1), ones(1, 8)
    layer = create(torch.full((8, depth), 127, dtype=torch.int8).T, scales, torch.float32, True, False, 32)
    codes = torch.full((1, depth), 127, dtype=torch.int8)
    operations.onednn_scaled_mm(layer, codes, out, ones(1, 1), None, None, None)
    return bool((out != 127.0 * 127.0 * depth).any())


class ExactLayer:
    """A layer of codes whose products are those of the integers on any processor."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor) -> None:
        """``weight``: codes `[in, out]`. ``scales``: one, or one an output."""
        self.k, self.n = weight.shape
        self.codes, self.rl_fn_scales = weight.detach().T.clone(), scales.float()
        # Numbers in which a sum of products of bytes is exact, so that its order does not matter.
        self.exact = torch.float32 if self.k * 2**14 <= 2**24 else torch.float64

    def multiply(
        self,
        x: torch.Tensor,
        output: torch.Tensor,
        input_scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        adjustment: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> None:
        """Write `scale_x · (x - zero_point) · codes · scale + bias` into ``output``.

        ``adjustment``: the sum of an output's codes times their scale.
        """
        token_scale = input_scale.reshape(-1, 1)
        sums = torch.nn.functional.linear(x.to(self.exact), self.codes.to(self.exact)).float()
        product = sums * (token_scale * self.rl_fn_scales.reshape(1, -1))
        if zero_point is not None and adjustment is not None:
            product -= token_scale * zero_point.reshape(-1, 1) * adjustment.reshape(1, -1)
        output.copy_(product if bias is None else product + bias)


def _also_exact(multiply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(multiply)
    def onednn_scaled_mm(layer: Any, x: torch.Tensor, output: torch.Tensor, *others: Any) -> torch.Tensor:
        if not isinstance(layer, ExactLayer):
            return multiply(layer, x, output, *others)
        layer.multiply(x, output, *others)
        return output

    onednn_scaled_mm.of_rl_fn = True  # type: ignore[attr-defined]
    return onednn_scaled_mm


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
    outputs = []
    for scale in (1.0, 2.0):
        scales.fill_(scale)
        out = torch.empty(1, 8)
        operations.onednn_scaled_mm(layer, codes, out, token_scales, None, None, None)
        outputs.append(out)
    return not torch.equal(*outputs)


def _holders(tensor: torch.Tensor) -> int:
    """How many references there are to a tensor's memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
