"""What a run leaves behind: metrics, events, curves, checkpoints."""

from rl_bridge.tracking.run import Run, Stopped

__all__ = ["Run", "Stopped"]
