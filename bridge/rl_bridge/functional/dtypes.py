"""Which torch dtype is which JAX dtype; a dtype without a partner is refused by name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

_PAIRS: tuple[tuple[torch.dtype, object], ...] = (
    (torch.bool, np.bool_),
    (torch.int8, np.int8),
    (torch.int16, np.int16),
    (torch.int32, np.int32),
    (torch.int64, np.int64),
    (torch.uint8, np.uint8),
    (torch.uint16, np.uint16),
    (torch.uint32, np.uint32),
    (torch.uint64, np.uint64),
    (torch.float16, np.float16),
    (torch.bfloat16, jnp.bfloat16),
    (torch.float32, np.float32),
    (torch.float64, np.float64),
    (torch.float8_e4m3fn, jnp.float8_e4m3fn),
    (torch.float8_e5m2, jnp.float8_e5m2),
    (torch.float8_e4m3fnuz, jnp.float8_e4m3fnuz),
    (torch.float8_e5m2fnuz, jnp.float8_e5m2fnuz),
)
_TO_JAX = {t: np.dtype(j) for t, j in _PAIRS}
_TO_TORCH = {j: t for t, j in _TO_JAX.items()}


def jax_dtype(dtype: torch.dtype) -> np.dtype:
    """The NumPy dtype that JAX uses for a torch dtype."""
    if dtype not in _TO_JAX:
        raise TypeError(f"{dtype} has no JAX counterpart here; supported: {', '.join(str(t) for t in _TO_JAX)}")
    return _TO_JAX[dtype]


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of a JAX or NumPy dtype."""
    # Typed PRNG keys have an extended dtype, which np.dtype() cannot read.
    if jnp.issubdtype(dtype, jax.dtypes.extended) or np.dtype(dtype) not in _TO_TORCH:
        raise NotImplementedError(f"from_jax has no torch dtype for JAX's {dtype}")
    return _TO_TORCH[np.dtype(dtype)]


def is_float(dtype: Any) -> bool:
    """Whether a JAX dtype (bfloat16 and float8 included) is a floating one."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def wide_types() -> bool:
    """Whether JAX computes in 64 bits here (jax_enable_x64); by default it narrows 64-bit types to 32."""
    return bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]
