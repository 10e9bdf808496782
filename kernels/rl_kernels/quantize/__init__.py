"""Weights to int8 or fp8 with fresh scales, into buffers that exist."""

from rl_kernels.quantize.api import quantize_

__all__ = ["quantize_"]
