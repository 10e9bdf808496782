"""Weights on their way from a trainer to a rollout engine."""

from rl_bridge.weights.meta_parameters import replace_parameters
from rl_bridge.weights.transfer import NamedWeights, checksum, named_weights, receive_weights

__all__ = ["NamedWeights", "checksum", "named_weights", "receive_weights", "replace_parameters"]
