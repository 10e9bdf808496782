"""Attention of packed documents, on one rank or cut over a sequence-parallel group."""

from rl_bridge.parallel.attention.register import use_rl_fn_attention
from rl_bridge.parallel.attention.ring import AttentionPlan

__all__ = ["AttentionPlan", "use_rl_fn_attention"]
