"""Linear layers with int8 weights, whose activations are quantised on the way."""

from rl_kernels.int8_matmul.api import int8_matmul

__all__ = ["int8_matmul"]
