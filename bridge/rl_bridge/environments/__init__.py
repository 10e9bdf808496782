"""Environments of a policy's conversations (``rl_bridge.rollout.conversations``): tools, games, simulated users."""

from rl_bridge.environments.environment import Environment, EnvironmentFactory, Step
from rl_bridge.environments.factories import Interact, load_environment

__all__ = ["Environment", "EnvironmentFactory", "Interact", "Step", "load_environment"]
