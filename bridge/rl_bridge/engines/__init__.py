"""Engines, which an algorithm holds. They do not show in how many processes their workers are."""

from rl_bridge.engines.dispatch import NeedParallel, returns
from rl_bridge.engines.engine import Engine
from rl_bridge.engines.inference import InferenceEngine
from rl_bridge.engines.module import ParallelModule
from rl_bridge.engines.train import TrainEngine
from rl_bridge.parallel.mesh import Mesh

__all__ = ["Engine", "InferenceEngine", "Mesh", "NeedParallel", "ParallelModule", "TrainEngine", "returns"]
