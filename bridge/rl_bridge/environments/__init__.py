"""What a policy talks to: tools, games, simulated users. ``rl_bridge.rollout.conversations`` lets the two talk."""

from rl_bridge.environments.environment import Environment, EnvironmentFactory, Step
from rl_bridge.environments.factories import Interact, load_environment

__all__ = ["Environment", "EnvironmentFactory", "Interact", "Step", "load_environment"]
