"""Oracle of quantisation. The convention is defined in float32 (scale, quotient, rounding), so its oracle is too."""

import ml_dtypes
import numpy as np

from tests.oracle.base import f64

FP8 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
FP8 = np.sort(FP8[np.isfinite(FP8.astype(np.float32))].astype(np.float64))


def _scale(group, largest):
    absmax = np.float32(np.abs(group).max())
    return np.float32(2.0**-23) if absmax == 0 else absmax / np.float32(largest)


def _nearest_fp8(x):
    """The nearest of all finite fp8 numbers; of two at the same distance, the one whose mantissa is even."""
    distance = np.abs(FP8 - np.float64(x))
    near = FP8[distance == distance.min()]
    if near.size == 1:
        return near[0]
    codes = np.abs(near).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return near[codes % 2 == 0][0]


def quantize_int8(weight, *, axis=-1, half_range=127.5):
    codes = np.zeros(weight.shape, np.int8)
    if axis is None:
        scale = np.full((1,) * weight.ndim, _scale(weight, half_range))
    else:
        scale = np.apply_along_axis(lambda row: _scale(row, half_range), axis, weight)
        scale = np.expand_dims(scale, axis)
    for i in np.ndindex(weight.shape):
        quotient = weight[i] / np.broadcast_to(scale, weight.shape)[i]
        # Python's round takes halves to even.
        codes[i] = min(max(round(float(quotient)), -128), 127)
    return codes, scale


def quantize_fp8(weight, *, granularity="channel", block=128):
    rows, columns = weight.shape[-2:]
    height = {"tensor": rows, "channel": 1, "block": block}[granularity]
    width = {"tensor": columns, "channel": columns, "block": block}[granularity]
    values = np.zeros(weight.shape)
    scale = np.zeros((*weight.shape[:-2], -(-rows // height), -(-columns // width)), np.float32)
    for i in np.ndindex(scale.shape):
        part = (*i[:-2], slice(i[-2] * height, (i[-2] + 1) * height), slice(i[-1] * width, (i[-1] + 1) * width))
        scale[i] = _scale(weight[part], 448.0)
        quotients = weight[part] / scale[i]
        values[part] = np.vectorize(_nearest_fp8)(np.clip(quotients, -448, 448))
    return values, scale


def dequantize(values, scale, *, block=None):
    if block is not None:
        scale = np.kron(f64(scale), np.ones((block, block)))[: values.shape[-2], : values.shape[-1]]
    return f64(values) * f64(scale)


def smooth_scales(activation_absmax, weight, *, alpha):
    pairs = zip(activation_absmax, weight.T, strict=True)
    return np.array([float(x) ** alpha / max(abs(float(w)) for w in column) ** (1 - alpha) for x, column in pairs])
