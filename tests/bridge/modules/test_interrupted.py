"""A call that ends in its middle, by an error or Ctrl-C, leaves nothing for the next update to add."""

import copy
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import rl_fn
from rl_bridge.algorithms.comparison_training import BatchStatistics, comparison_update
from rl_bridge.algorithms.policy_training import critic_update, policy_update
from rl_bridge.algorithms.supervised_training import supervised_update
from rl_bridge.engines import TrainEngine
from rl_bridge.engines.engine import Engine
from rl_bridge.executors import Slot
from rl_bridge.executors.driver import RemoteExecutor
from rl_bridge.executors.host import Host
from rl_bridge.executors.slots import Own
from rl_bridge.memory.token_budget import LEAST
from rl_bridge.models.model_source import StateSource
from rl_bridge.modules.comparison import ComparisonLoss, PreferenceModule
from rl_bridge.modules.policy import PolicyModule
from rl_bridge.modules.supervised import SupervisedModule
from rl_bridge.parallel.config import ParallelConfig
from tests.support.lora_families import tiny
from tests.support.small_trainers import COMPARED, OPTIMIZER, SOURCE, TRAINED, batch_of, made

BFLOAT16 = ParallelConfig(param_dtype=torch.bfloat16)
MODULES: dict[str, Any] = TRAINED | {
    "policy over the batch": partial(PolicyModule, SOURCE, OPTIMIZER, rl_fn.recipes.m2po(threshold=0.01)),
    "sorted pairs": partial(PreferenceModule, SOURCE, OPTIMIZER, ComparisonLoss(name="dpo", constants={})),
    "mixture": None,
    "sharded": partial(SupervisedModule, SOURCE, OPTIMIZER, parallel=BFLOAT16),
    "budget": partial(SupervisedModule, SOURCE, OPTIMIZER),
}


def factory_of(name):
    if name != "mixture":
        return MODULES[name]
    model = tiny("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    return partial(SupervisedModule, StateSource(model), OPTIMIZER)


ERRORS = {"an error": ValueError("a row has 9 tokens"), "Ctrl-C": KeyboardInterrupt()}
PLACES = ("forward", "in the backward pass", "after it")
TOKENS = LEAST
"""Tokens of a micro-batch: a step has several."""


def rows_of(name, step=0):
    return batch_of("dpo" if name == "sorted pairs" else name, step)


def add(name, module, step=0):
    """One ``train_step``, or what a loss that sorts the batch does in its place."""
    batch = rows_of(name, step)
    if name == "sorted pairs":
        return module.backward_through(batch, torch.linspace(-1.0, 1.0, 18).view(9, 2), True)
    if name in COMPARED:
        return module.train_step(batch, 9.0, dict.fromkeys(module.loss.statistics, 0.1))
    return module.train_step(batch, float(batch.mask.sum()))


def update(name, module):
    """Metrics and weights of an update."""
    metrics = add(name, module), module.optimizer_step()
    return metrics, weights_of(module)


def weights_of(module):
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in module.parameters()]


class Break:
    """Raises once, in the second forward or backward pass."""

    def __init__(self, module, place, error, monkeypatch):
        self.error, self.place, self.count = error, place, 0
        self._real = torch.autograd.backward
        embeddings = (m for m in module.modules() if isinstance(m, torch.nn.Embedding))
        self._hook = next(embeddings).register_forward_hook(self._forward)
        monkeypatch.setattr(torch.autograd, "backward", self._backward)

    def _fail(self, *_):
        self._hook.remove()
        self.place, error = "", self.error
        raise error

    def _forward(self, module, inputs, output):
        self.count += self.place != "after it"
        if self.place == "forward" and self.count == 2:
            self._fail()
        if self.place == "in the backward pass" and self.count >= 2 and output.requires_grad:
            output.register_hook(self._fail)  # the gradients of all later layers are there by then
            self.count = -(10**6)

    def _backward(self, *args, **kwargs):
        self._real(*args, **kwargs)
        self.count += self.place == "after it"
        if self.place == "after it" and self.count == 2:
            self._fail()


@pytest.fixture(scope="module")
def modules():
    """A module of each kind with its first state, and an update of its own."""
    cache: dict[str, Any] = {}

    def get(name):
        if name not in cache:
            module = made(factory_of(name), "auto" if name == "budget" else TOKENS, updates=9)
            if name == "budget":
                module.budget.tokens = module.budget.ceiling = LEAST  # whatever memory there is
            first = copy.deepcopy(module.checkpoint_state())
            cache[name] = module, first, update(name, module)
        module, first, alone = cache[name]
        module.load_checkpoint_state(copy.deepcopy(first))
        return module, alone

    return get


def some(names):
    """All of them, those that take another way through a step at each commit."""
    soon = ("sft", "policy", "dpo", "mixture", "sharded", "budget")
    return [name if name in soon else pytest.param(name, marks=pytest.mark.slow) for name in names]


def same(found, wanted):
    assert found[0] == wanted[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", some(MODULES))
def test_a_failed_try_and_an_update_are_the_update_alone(modules, name, place, error, monkeypatch):
    module, alone = modules(name)
    with monkeypatch.context() as patch, pytest.raises(type(ERRORS[error])):
        Break(module, place, ERRORS[error], patch)
        add(name, module)
    assert all(p.grad is None for p in module.parameters())
    same(update(name, module), alone)


@pytest.mark.parametrize("name", ["sft", "sharded"])
def test_a_failed_try_after_a_whole_one_is_refused_until_all_are_made_again(modules, name, monkeypatch):
    module, _ = modules(name)
    wanted = add(name, module, 1), update(name, module)
    module, _ = modules(name)
    add(name, module, 1)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="9 tokens"):
        Break(module, "after it", ERRORS["an error"], patch)
        add(name, module)
    for call in (module.optimizer_step, partial(add, name, module)):
        with pytest.raises(RuntimeError, match=r"ended in the middle.*call zero_grad\(\)"):
            call()
    module.zero_grad()
    found = add(name, module, 1), update(name, module)
    assert found[0] == wanted[0]
    same(found[1], wanted[1])


def test_an_update_that_ends_before_it_changes_a_weight_can_be_made_again(modules, monkeypatch):
    module, alone = modules("sft")
    version = module.weights_version()
    add("sft", module)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.optimizer, "step", raises)
        module.optimizer_step()
    assert module.weights_version() == version
    module.zero_grad()
    same(update("sft", module), alone)


def test_weights_that_an_update_left_half_way_are_refused_until_a_checkpoint_comes(modules, monkeypatch):
    module, alone = modules("sft")
    first, real = copy.deepcopy(module.checkpoint_state()), module.optimizer.step

    def half_way():
        real()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.optimizer, "step", half_way)
        update("sft", module)
    for use in (module.require_weights, module.weights_version, module.checkpoint_state):
        with pytest.raises(ValueError, match=r"the weights here are incomplete.*or load a checkpoint"):
            use()
    module.load_checkpoint_state(first)
    same(update("sft", module), alone)


def raises(*_):
    raise KeyboardInterrupt


def comparison(engine, batch):
    loss = ComparisonLoss(name="dpo", constants={})
    return comparison_update(engine, loss, batch, BatchStatistics(loss))


UPDATES = {
    "sft": supervised_update,
    "policy": lambda engine, batch: policy_update(engine, batch, 9.0, 9, {}),
    "critic": lambda engine, batch: critic_update(engine, batch, 9.0),
    "dpo": comparison,
}


def interrupts(place):
    """``Engine.call`` that Ctrl-C ends at a place, once; the worker gets what was sent before."""
    real, left = Engine.call, [place]

    def call(engine, method, *args, **kwargs):
        if left == ["between"] and method == "optimizer_step":
            left.clear()
            raise KeyboardInterrupt
        if left == [f"in {method}"]:
            left.clear()
            engine.submit(method, *args, **kwargs)
            raise KeyboardInterrupt
        return real(engine, method, *args, **kwargs)

    return call


@pytest.mark.parametrize("place", ["in train_step", "between", "in optimizer_step"])
@pytest.mark.parametrize("name", some(UPDATES))
def test_an_update_whose_caller_was_interrupted_leaves_no_gradient(modules, name, place, monkeypatch):
    """A worker goes on with the call that the driver no longer waits for."""
    module, _ = modules(name)
    batch, goes_on = rows_of(name), threading.Event()
    executor: Any = RemoteExecutor([Slot(0)], [Own(Host(0))], timeout=60)

    def made_update():
        return UPDATES[name](engine, batch), weights_of(module)

    def waits(loss):
        assert goes_on.wait(30)
        type(module).backward(module, loss)

    try:
        engine = TrainEngine(lambda: module, executor=executor, name=name).build()
        first, second = made_update(), made_update()
        modules(name)
        monkeypatch.setattr(module, "backward", waits)
        monkeypatch.setattr(Engine, "call", interrupts(place))
        if place != "in train_step":
            goes_on.set()
        with pytest.raises(KeyboardInterrupt):
            made_update()
        goes_on.set()
        # An update whose end nobody waited for is made all the same.
        same(made_update(), second if place == "in optimizer_step" else first)
    finally:
        executor.stop()
