"""The two facades an algorithm is written against; neither shows a rank."""

from rl_bridge.engines.inference import InferenceEngine
from rl_bridge.engines.parallel import NeedParallel
from rl_bridge.engines.train import TrainEngine

__all__ = ["InferenceEngine", "NeedParallel", "TrainEngine"]
