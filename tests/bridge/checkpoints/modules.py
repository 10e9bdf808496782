"""A module with every kind of state, and what compares two runs of it."""

import random

import numpy as np
import torch

from rl_bridge.checkpoints import load_optimizer_state, optimizer_state
from rl_bridge.engines import TrainEngine
from rl_bridge.engines.module import ParallelModule


class Trained(ParallelModule):
    """Tied weights, a buffer, a parameter without gradient, an optimiser whose state has scalars, a schedule."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.nn.Parameter(torch.randn(5, 3, generator=generator))
        self.tied = self.first
        self.row = torch.nn.Parameter(torch.randn(1, 3, generator=generator))
        self.frozen = torch.nn.Parameter(torch.randn(2, generator=generator), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def on_weights_materialized(self):
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (step + 1))

    def update(self):
        loss = (self.tied @ self.row.T + self.frozen.sum() + torch.rand(())).square().mean()
        loss.backward()
        self.optimizer.step(), self.scheduler.step(), self.optimizer.zero_grad()
        self.seen += 1
        return float(loss.detach())

    def on_parameters_replaced(self, replaced):
        self.on_weights_materialized()

    def checkpoint_state(self):
        self.require_weights()
        optimizer = optimizer_state(self, self.optimizer)
        return {"module": self.state_dict(), "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load_checkpoint_state(self, state):
        self.load_state_dict(state["module"])
        load_optimizer_state(self, self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.weight_receiver().version = 0


def engine_of(seed=0):
    return TrainEngine(lambda: Trained(seed)).build()


def draw():
    """A number of every global generator."""
    return random.random(), float(np.random.normal()), random.gauss(0, 1), torch.rand(3).tolist()


def names(folder):
    return sorted(path.name for path in folder.iterdir())
