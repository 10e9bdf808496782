"""rl_fn in PyTorch: engines, rollouts, runs, and by name all that a training loop of your own needs.

>>> from rl_bridge import AdamW, Policy, Reference, Rollout, Run, SamplingParams, init, load_model, load_rows

Each name is loaded when first asked for, with torch; ``import rl_bridge`` alone loads neither torch nor vLLM.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_bridge.data.trajectory import SamplingParams, Trajectory
    from rl_bridge.engines import Mesh
    from rl_bridge.engines.engine import Turns
    from rl_bridge.executors.session import current_executor, init
    from rl_bridge.loop.ahead import Ahead
    from rl_bridge.loop.data import NLL, Model, Rows, load_model, load_rows, preference_loss, tiny_model
    from rl_bridge.loop.groups import GroupBatch, Groups
    from rl_bridge.loop.loop_run import Run
    from rl_bridge.loop.rollout import Rollout
    from rl_bridge.loop.scored import AdamW, Reference, Teacher
    from rl_bridge.loop.trained import Policy
    from rl_bridge.loop.values import Critic, RewardModel
    from rl_bridge.modules.own_loss import torch_loss
    from rl_bridge.modules.scoring import ScoringConfig
    from rl_bridge.parallel.config import ParallelConfig
    from rl_bridge.pipelines.rollout_options import RolloutOptions
    from rl_bridge.pipelines.training import LoRAOptions
    from rl_bridge.rollout.vllm import VLLMOptions

# JAX traces here and computes next to nothing; where it has a GPU it would take three quarters of it from torch.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

__all__ = [
    "NLL",
    "AdamW",
    "Ahead",
    "Critic",
    "GroupBatch",
    "Groups",
    "LoRAOptions",
    "Mesh",
    "Model",
    "ParallelConfig",
    "Policy",
    "Reference",
    "RewardModel",
    "Rollout",
    "RolloutOptions",
    "Rows",
    "Run",
    "SamplingParams",
    "ScoringConfig",
    "Teacher",
    "Trajectory",
    "Turns",
    "VLLMOptions",
    "current_executor",
    "init",
    "load_model",
    "load_rows",
    "preference_loss",
    "tiny_model",
    "torch_loss",
]

_PLACES = {
    "data.trajectory": ("SamplingParams", "Trajectory"),
    "engines": ("Mesh",),
    "engines.engine": ("Turns",),
    "executors.session": ("current_executor", "init"),
    "loop.ahead": ("Ahead",),
    "loop.data": ("NLL", "Model", "Rows", "load_model", "load_rows", "preference_loss", "tiny_model"),
    "loop.groups": ("GroupBatch", "Groups"),
    "loop.rollout": ("Rollout",),
    "loop.loop_run": ("Run",),
    "loop.scored": ("AdamW", "Reference", "Teacher"),
    "loop.trained": ("Policy",),
    "loop.values": ("Critic", "RewardModel"),
    "modules.scoring": ("ScoringConfig",),
    "modules.own_loss": ("torch_loss",),
    "parallel.config": ("ParallelConfig",),
    "pipelines.rollout_options": ("RolloutOptions",),
    "pipelines.training": ("LoRAOptions",),
    "rollout.vllm": ("VLLMOptions",),
}
"""Modules and the public names that lie in them."""


def __getattr__(name: str) -> Any:
    """A public name, imported with torch when first asked for."""
    for module, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
