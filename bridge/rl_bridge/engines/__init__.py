"""What an algorithm holds. Engines do not show in how many processes their workers are."""

from rl_bridge.engines.base import Engine
from rl_bridge.engines.inference import InferenceEngine
from rl_bridge.engines.mesh import Mesh
from rl_bridge.engines.module import ParallelModule
from rl_bridge.engines.results import returns
from rl_bridge.engines.splitting import NeedParallel
from rl_bridge.engines.train import TrainEngine

__all__ = ["Engine", "InferenceEngine", "Mesh", "NeedParallel", "ParallelModule", "TrainEngine", "returns"]
