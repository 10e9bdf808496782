"""A trainer's module as an engine makes it on one worker, without the engine."""

import torch

from rl_bridge.common.random_numbers import generators
from rl_bridge.engines.worker import torch_worker
from rl_bridge.models.model_source import StateSource


def ready(kind, model, *args, **options):
    """A module of the class ``kind`` with the weights of ``model``: meta device, then weights, then optimiser."""
    source = StateSource(model)
    return torch_worker(lambda: kind(source, *args, **options), None, torch.device("cpu"), generators())
