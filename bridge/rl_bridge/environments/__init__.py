"""What a policy talks to: tools, games, simulated users. ``rl_bridge.rollout.conversations`` lets the two talk."""

from rl_bridge.environments.base import Environment, EnvironmentFactory, Step
from rl_bridge.environments.interact import Interact
from rl_bridge.environments.loading import load_environment

__all__ = ["Environment", "EnvironmentFactory", "Interact", "Step", "load_environment"]
