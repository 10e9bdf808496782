"""Rollouts by vLLM. Importing this package imports no vLLM: its modules with engines in them do."""

from rl_bridge.rollout.vllm.engine_options import VLLMOptions

__all__ = ["VLLMOptions"]
