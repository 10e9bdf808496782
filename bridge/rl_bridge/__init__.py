"""rl_fn in PyTorch: trainers, engines, rollouts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_bridge.session import current_executor, init

__all__ = ["current_executor", "init"]


def __getattr__(name: str) -> Any:
    """``init`` and ``current_executor``, imported with torch when first asked for."""
    if name in __all__:
        from rl_bridge import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
