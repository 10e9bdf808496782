"""Values that must not cross between torch and JAX are refused by name, before a crash, a hang or garbage."""

import os
import sys
from typing import Any

import torch

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
