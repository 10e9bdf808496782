"""Checkpoints of a run: every engine's share written by its own workers, whole or not at all, on any mesh readable."""

from rl_bridge.checkpoints.checkpointer import Checkpointer
from rl_bridge.checkpoints.writing import CheckpointError
from rl_bridge.engines.module import load_optimizer_state, optimizer_state

__all__ = ["CheckpointError", "Checkpointer", "load_optimizer_state", "optimizer_state"]
