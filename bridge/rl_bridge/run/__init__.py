"""A run and its folder: metrics, events, curves, checkpoints."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_bridge.run.run import Run, Stopped

__all__ = ["Run", "Stopped"]


def __getattr__(name: str) -> Any:
    """``Run`` and ``Stopped``, imported with torch at their first use: an exporter's process needs no torch."""
    if name in __all__:
        from rl_bridge.run import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
