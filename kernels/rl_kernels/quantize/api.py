"""One signature for all backends of ``quantize_``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_kernels.backends import implementation
from rl_kernels.quantize.scheme import FP8_MAX, GRANULARITIES, OUT_DTYPES, Scheme

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize_(
    weights: Sequence[Tensor],
    out: Sequence[Tensor],
    scales: Sequence[Tensor],
    *,
    scheme: str = "int8",
    granularity: str = "channel",
    block: int = 128,
    half_range: float = 127.5,
    backend: str | None = None,
) -> None:
    """Quantise weights symmetrically into buffers that exist, with scales from these weights.

    Codes and scales are those of ``rl_fn.quantize_int8`` and ``rl_fn.quantize_fp8``, bit for bit. What shares a scale
    with NaN or infinity has scale NaN and codes 0; zeros have scale 2⁻²³. (XLA on a CPU takes subnormal numbers for 0,
    the others do not: what shares a scale may differ if all of it is below 1e-32.) A model's list takes Triton a launch
    for each of three widths of a row, and one more with a scale a tensor.

    Args:
        weights: float32, bfloat16 or float16, not empty, of any strides; ``[…]`` for int8 and ``[…, out, in]`` for fp8.
        out: buffers of the weights' shapes, of any strides: int8, or float8_e4m3fn, or float8_e4m3fnuz (gfx942). The
            buffer's dtype decides which fp8: the latter takes the same bits with doubled scales (and 0 for −0, whose
            bits are its NaN), so that both dequantise to the same numbers.
        scales: contiguous float32 buffers of the shapes that rl_fn returns; axes of length 1 may be missing.
        scheme: "int8" or "fp8".
        granularity: what shares a scale: "tensor" (fp8: a matrix of a stack), "channel" (a row of the last axis), or
            for fp8 "block" (``block`` × ``block`` elements of the last two axes).
        block: side of a block; Triton takes up to 128.
        half_range: of int8, as in ``rl_fn.quantize_int8``: 127.5 as compressed-tensors has it, or 127.
        backend: ``"triton"``, ``"torch"`` or ``"reference"`` (rl_fn). None takes the best supported one.

    Raises:
        ValueError: what does not fit, by its name and place in the list.
        NotImplementedError: a backend that does not exist or cannot run here; a block too large for Triton.

    >>> codes, scale = torch.empty(1, 3, dtype=torch.int8), torch.empty(1, 1)
    >>> quantize_([torch.tensor([[127.5, -1.0, 0.4]])], [codes], [scale])
    >>> codes.tolist(), scale.tolist()
    ([[127, -1, 0]], [[1.0]])
    """
    if scheme not in OUT_DTYPES:
        raise ValueError(f"scheme must be one of {tuple(OUT_DTYPES)}, got {scheme!r}")
    if granularity not in GRANULARITIES[scheme]:
        raise ValueError(f"granularity of {scheme} must be one of {GRANULARITIES[scheme]}, got {granularity!r}")
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    if not 127 <= half_range <= 128:
        raise ValueError(f"half_range must be within [127, 128], got {half_range}")
    if scheme != "int8" and half_range != 127.5:
        raise ValueError(f"half_range belongs to int8, got {half_range} with {scheme}")
    if not len(weights) == len(out) == len(scales):
        raise ValueError(
            f"weights, out and scales must be equally many, got {len(weights)}, {len(out)} and {len(scales)}"
        )
    if not weights:
        return
    settings = Scheme(scheme, granularity, block, float(half_range) if scheme == "int8" else FP8_MAX)
    for i, triple in enumerate(zip(weights, out, scales, strict=True)):
        _check(i, *triple, settings, weights[0].device)
    views = [s.detach().view(settings.scale_shape(w.shape)) for w, s in zip(weights, scales, strict=True)]
    _quantize([w.detach() for w in weights], [o.detach() for o in out], views, *settings, backend)


def _check(i: int, weight: Tensor, out: Tensor, scales: Tensor, scheme: Scheme, device: torch.device) -> None:
    for name, tensor in (("weights", weight), ("out", out), ("scales", scales)):
        if tensor.device != device:
            raise ValueError(f"{name}[{i}] must be on {device} as weights[0] is, got {tensor.device}")
    if weight.dtype not in _WEIGHT_DTYPES:
        raise ValueError(f"weights[{i}] must be float32, bfloat16 or float16, got {weight.dtype}")
    least = 1 if scheme.name == "int8" else 2
    if weight.dim() < least:
        raise ValueError(f"weights[{i}] must have at least {least} axes, got shape {tuple(weight.shape)}")
    if not weight.numel():
        raise ValueError(f"weights[{i}] must not be empty, got shape {tuple(weight.shape)}")
    if out.shape != weight.shape:
        raise ValueError(f"out[{i}] must have its weight's shape {tuple(weight.shape)}, got {tuple(out.shape)}")
    if out.dtype not in OUT_DTYPES[scheme.name]:
        allowed = " or ".join(str(dtype) for dtype in OUT_DTYPES[scheme.name])
        raise ValueError(f"out[{i}] must be {allowed}, got {out.dtype}")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"out[{i}] must have an element of memory for each of its own, got strides {out.stride()}")
    if scales.dtype != torch.float32 or not scales.is_contiguous():
        raise ValueError(f"scales[{i}] must be contiguous float32, got {scales.dtype} with strides {scales.stride()}")
    shape = scheme.scale_shape(weight.shape)
    if [size for size in scales.shape if size != 1] != [size for size in shape if size != 1]:
        raise ValueError(
            f"scales[{i}] must have shape {shape} for {scheme.granularity} scales of {tuple(weight.shape)}, "
            f"got {tuple(scales.shape)}"
        )


@torch.library.custom_op("rl_kernels::quantize_", mutates_args=("out", "scales"))
def _quantize(
    weights: list[Tensor],
    out: list[Tensor],
    scales: list[Tensor],
    scheme: str,
    granularity: str,
    block: int,
    largest: float,
    backend: str | None,
) -> None:
    run = implementation("quantize", weights[0].device.type, backend).forward
    run(weights, out, scales, Scheme(scheme, granularity, block, largest))


@_quantize.register_fake
def _(weights, out, scales, scheme, granularity, block, largest, backend):
    return None
