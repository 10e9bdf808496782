"""The seam between JAX and PyTorch: one formula, three ways to run it."""

from rl_bridge.functional.call import from_jax

__all__ = ["from_jax"]
