"""What a run leaves behind: metrics, events, curves, checkpoints."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_bridge.run.run import Run, Stopped

__all__ = ["Run", "Stopped"]


def __getattr__(name: str) -> Any:
    """``Run`` and ``Stopped``, imported with torch when first asked for: an exporter's process does without."""
    if name in __all__:
        from rl_bridge.run import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
