"""Engines that take turns on a device: who works is there, who waits is in host memory."""

from types import SimpleNamespace

import pytest
import torch

from rl_bridge.engines import TrainEngine
from rl_bridge.engines.engine import Turns


class Moving:
    """An engine's moves, without a device."""

    def __init__(self, name, moves, kind="cuda:0"):
        self.name, self.moves, self.slots, self.before_call = name, moves, [0], None
        self.executor = SimpleNamespace(slots=[SimpleNamespace(index=0, device=kind)])

    def cpu(self):
        self.moves.append(f"{self.name} off")

    def cuda(self):
        self.moves.append(f"{self.name} on")


def test_an_engine_that_works_is_alone_on_the_device():
    moves, turns = [], Turns()
    policy, rollout, reference = engines = [Moving(name, moves) for name in ("policy", "rollout", "reference")]
    for engine in engines:
        turns.add(engine)
    assert moves == ["policy off", "rollout off", "reference off"]
    moves.clear()
    policy.before_call(policy)
    policy.before_call(policy, rollout)  # a sync has both
    rollout.before_call(rollout)
    rollout.before_call(rollout)
    assert moves == ["policy on", "rollout on", "policy off"]
    moves.clear()
    rollout.slots = []  # released
    reference.before_call(reference)
    assert moves == ["reference on"]


def test_without_an_accelerator_nothing_moves():
    moves = []
    engine = Moving("policy", moves, "cpu")
    Turns().add(engine)
    assert not moves and engine.before_call is None


class Doubler(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def double(self, x):
        return 2 * x


@pytest.mark.parametrize("method", ["call", "submit", "name"])
def test_an_engine_asks_before_it_works(method):
    asked = []
    engine, other = (TrainEngine(Doubler).build() for _ in range(2))
    engine.before_call = lambda *engines: asked.append(engines)
    calls = {"call": lambda: engine.call("double", 2), "submit": lambda: engine.submit("double", 2).result()}
    assert calls.get(method, lambda: engine.double(2))() == 4
    assert asked == [(engine,)]
    engine.sync_weights(other)
    assert asked[-1] == (engine, other)
    engine.release(), other.release()
