"""Interop of JAX and PyTorch: one formula, three ways to run it. See docs/bridge.md."""

from rl_bridge.functional.call import from_jax
from rl_bridge.functional.torch_in_jax import to_jax
from rl_bridge.functional.xla import through_xla

__all__ = ["from_jax", "through_xla", "to_jax"]
