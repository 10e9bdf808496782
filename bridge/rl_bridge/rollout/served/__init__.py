"""Rollouts by servers over HTTP: vLLM's as a process of ours, SGLang's, and any of OpenAI's protocol."""

from rl_bridge.rollout.served.openai import OpenAIEndpoint
from rl_bridge.rollout.served.process import ServerDied
from rl_bridge.rollout.served.served_rollout import ServedRollout, SGLangRollout
from rl_bridge.rollout.served.sglang import SGLangOptions
from rl_bridge.rollout.served.vllm_server import ServedOptions

__all__ = ["OpenAIEndpoint", "SGLangOptions", "SGLangRollout", "ServedOptions", "ServedRollout", "ServerDied"]
