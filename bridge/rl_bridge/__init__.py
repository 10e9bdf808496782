"""rl_fn in PyTorch: trainers, engines, rollouts."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_bridge.executors.session import current_executor, init

# JAX traces here and computes next to nothing; where it has a GPU it would take three quarters of it from torch.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

__all__ = ["current_executor", "init"]


def __getattr__(name: str) -> Any:
    """``init`` and ``current_executor``, imported with torch when first asked for."""
    if name in __all__:
        from rl_bridge.executors import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
