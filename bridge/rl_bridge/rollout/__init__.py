"""Rollout workers: what stands behind an ``InferenceEngine``."""

from rl_bridge.rollout.inprocess import InProcessRollout

__all__ = ["InProcessRollout"]
