"""The two engines that an algorithm holds. Neither shows in how many processes the workers are."""

from rl_bridge.engines.inference import InferenceEngine
from rl_bridge.engines.parallel import NeedParallel
from rl_bridge.engines.train import TrainEngine

__all__ = ["InferenceEngine", "NeedParallel", "TrainEngine"]
