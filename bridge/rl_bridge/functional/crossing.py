"""Values that cross between torch and JAX: the partner of each dtype, and what is refused by name."""

import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

# Which torch dtype is which JAX dtype; a dtype without a partner is refused by name.

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


# Values that must not cross between torch and JAX are refused by name, before a crash, a hang or garbage.

_forked_after_start = False


def _backends_started() -> bool:
    """Whether XLA's threads run. JAX has no public name for it; without the private one, imported counts as started."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and getattr(bridge, "backends_are_initialized", lambda: True)()


def _after_fork_in_child() -> None:
    global _forked_after_start
    _forked_after_start = _forked_after_start or _backends_started()


os.register_at_fork(after_in_child=_after_fork_in_child)


def refuse_fork(who: str) -> None:
    """Raise in a process forked after JAX started: XLA's threads are not in it, and waiting for one never ends."""
    if _forked_after_start:
        raise RuntimeError(
            f"{who} needs JAX in a process that was forked after JAX started, where it would hang; start workers with "
            "multiprocessing's 'spawn' (DataLoader(..., multiprocessing_context='spawn'))"
        )


def require_plain(x: Any, who: str) -> torch.Tensor:
    """The tensor, if DLPack can hand over its memory."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed.tensor import DTensor

    if isinstance(x, DTensor):
        raise TypeError(f"{who}: a DTensor holds one shard of its values; pass x.full_tensor() or x.to_local()")
    if isinstance(x, FakeTensor) or x.device.type == "meta":
        raise TypeError(f"{who}: a FakeTensor (or a meta tensor) has a shape but no values; use from_jax to trace")
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(f"{who}: tensors of class {type(x).__name__} may not hold their values as DLPack reads them")
    if x.layout != torch.strided:
        raise TypeError(f"{who}: DLPack has no {x.layout} tensors; pass x.to_dense()")
    return x
