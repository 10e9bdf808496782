"""Rollout workers, which stand behind an ``InferenceEngine``."""

from rl_bridge.rollout.inprocess import InProcessRollout

__all__ = ["InProcessRollout"]
