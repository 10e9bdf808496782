"""PyTorch, some rows at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rl_kernels.quantize.scheme import SMALLEST_SCALE, Scheme

# Elements of a float32 temporary; a handful are alive at once.
_CHUNK = 1 << 24


def forward(weights: list[Tensor], out: list[Tensor], scales: list[Tensor], scheme: Scheme) -> None:
    """Write codes into ``out`` and scales, shaped as rl_fn's, into ``scales``."""
    for weight, codes, scale in zip(weights, out, scales, strict=True):
        for matrix in _matrices(weight, codes, scale, scheme):
            _quantize(*matrix, scheme)


def _matrices(weight: Tensor, codes: Tensor, scale: Tensor, scheme: Scheme) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """A row as a matrix; the matrices of an fp8 stack one by one, as each has its own scales."""
    if weight.dim() == 1:
        yield weight[None], codes[None], scale[None]
    elif weight.dim() > 2 and scheme.name == "fp8":
        for part in zip(weight, codes, scale, strict=True):
            yield from _matrices(*part, scheme)
    else:
        yield weight, codes, scale


def _quantize(weight: Tensor, codes: Tensor, scale: Tensor, scheme: Scheme) -> None:
    unit = scheme.block if scheme.granularity == "block" else 1
    step = unit * max(1, _CHUNK // (weight[0].numel() * unit))
    parts = [slice(first, first + step) for first in range(0, len(weight), step)]
    if scheme.granularity == "tensor":
        peak = torch.stack([weight[rows].float().abs().amax() for rows in parts]).amax()
        scale.copy_(peak.reshape(scale.shape))
    for rows in parts:
        x = weight[rows].float()
        if scheme.granularity == "tensor":
            mine = scale
        elif scheme.granularity == "channel":
            mine = scale[rows]
            mine.copy_(x.abs().amax(-1, keepdim=True))
        else:
            mine = scale[rows.start // unit : -(-rows.stop // unit)]
            mine.copy_(_block_absmax(x, unit))
        peak = mine if scheme.granularity != "block" else _spread(mine, unit, x.shape)
        finite = peak.isfinite()
        divisor = _scale(peak, scheme.largest)
        ratio = torch.where(finite, x / divisor.where(finite, 1.0), 0.0).clamp_(*scheme.bounds)
        _store(ratio, codes[rows])
        if scheme.granularity != "tensor":
            _store_scales(mine, scheme, codes.dtype)
    if scheme.granularity == "tensor":
        _store_scales(scale, scheme, codes.dtype)


def _scale(peak: Tensor, largest: float) -> Tensor:
    # Divided by a tensor: PyTorch would replace a division by a Python number with a multiplication.
    scale = peak / torch.full_like(peak, largest)
    return scale.masked_fill(scale == 0, SMALLEST_SCALE)


def _store_scales(peak: Tensor, scheme: Scheme, dtype: torch.dtype) -> None:
    """Replace the largest magnitudes, from which the codes were made, by the scales."""
    scale = _scale(peak, scheme.largest)
    if dtype == torch.float8_e4m3fnuz:
        scale = scale * 2.0
    peak.copy_(scale.masked_fill(~peak.isfinite(), float("nan")))


def _block_absmax(x: Tensor, block: int) -> Tensor:
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x.abs(), (0, -columns % block, 0, -rows % block))
    return padded.unflatten(1, (-1, block)).unflatten(0, (-1, block)).amax((1, 3))


def _spread(scale: Tensor, block: int, shape: torch.Size) -> Tensor:
    """Each block's number for each of its elements."""
    wide = scale.repeat_interleave(block, 1)[:, : shape[1]]
    return wide.repeat_interleave(block, 0)[: shape[0]]


def _store(ratio: Tensor, codes: Tensor) -> None:
    if codes.dtype == torch.int8:
        codes.copy_(ratio.round_())
        return
    bits = ratio.to(torch.float8_e4m3fn).view(torch.uint8)
    if codes.dtype == torch.float8_e4m3fnuz:
        bits.masked_fill_(bits == 0x80, 0)
    codes.view(torch.uint8).copy_(bits)
