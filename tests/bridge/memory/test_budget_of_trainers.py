"""Weights after several steps do not depend on the token budget, also where memory was short in one of them."""

import copy
from functools import partial
from typing import Any

import pytest
import torch

from rl_bridge.memory import token_budget
from rl_bridge.memory.token_budget import LEAST
from rl_bridge.modules.comparison import CompletionScorer
from rl_bridge.modules.scoring import TokenScorer
from rl_bridge.modules.value import ValueScorer
from tests.bridge.memory.shortage import SHORT, fails
from tests.support.one_step import host_of_rank, mesh_of, whole
from tests.support.ranks import as_rank, found_by_ranks
from tests.support.small_trainers import COMPARED, HEADED, SOURCE, TRAINED, batch_of, made, make_step


def trained(name: str, tokens: Any, short_at: int | None = None) -> Any:
    """After four steps. Memory is short in one of them, after a micro-batch's backward pass."""
    module = made(TRAINED[name], tokens, updates=9)
    if module.budget is not None:
        module.budget.tokens = 2 * LEAST
    for step in range(4):
        if step == short_at:
            module.backward = fails(module.backward, 0)
        make_step(name, module, batch_of(name, step))
    return module


SOON = ("sft", "dpo", "reward model")


@pytest.mark.parametrize(
    "name", [name if name in SOON else pytest.param(name, marks=pytest.mark.slow) for name in TRAINED]
)
def test_weights_after_several_steps_are_those_of_a_fixed_budget(name: str):
    fixed, auto = trained(name, 16384), trained(name, "auto", short_at=1)
    assert auto.budget.failures == 1 and auto.budget.tokens > LEAST and auto.weights_version() == 4
    assert fixed.largest_micro_batch > 2 * LEAST, "one micro-batch against several"
    moved = made(TRAINED[name], 16384, updates=9)
    assert any(not torch.equal(a, b) for a, b in zip(moved.parameters(), fixed.parameters(), strict=True))
    for a, b in zip(fixed.parameters(), auto.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", SOON)
def test_a_resumed_budget_goes_on_where_it_was(name: str, monkeypatch):
    """With memory that each step takes alike: a ceiling that was learnt once is not run into again."""
    for measured, value in {"in_use": 10, "peak": 20, "room": 10**9}.items():
        monkeypatch.setattr(token_budget, measured, lambda place, value=value: value)

    def budget_after(module, steps):
        found = []
        for step in steps:
            make_step(name, module, batch_of(name, step))
            found.append((module.budget.learnt(), module.largest_micro_batch))
        return found, [p.detach().clone() for p in module.parameters()]

    whole = made(TRAINED[name], "auto", updates=9)
    whole.budget.tokens = 2 * LEAST
    whole.backward = fails(whole.backward, 0)
    budget_after(whole, range(2))
    state, resumed = copy.deepcopy(whole.checkpoint_state()), made(TRAINED[name], "auto", updates=9)
    resumed.load_checkpoint_state(state)
    wanted, weights = budget_after(whole, range(2, 4))
    found, again = budget_after(resumed, range(2, 4))
    assert found == wanted and wanted[0][0]["failures"] == 1 and wanted[0][0]["ceiling"] < 2 * LEAST
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
    fixed = made(TRAINED[name], 16384, updates=9)
    fixed.load_checkpoint_state(state)  # another budget takes the rest
    assert fixed.weights_version() == 2


SCORED: dict[str, tuple[Any, ...]] = {
    "reference": (TokenScorer, SOURCE, "token_logprobs", "policy"),
    "frozen critic": (ValueScorer, HEADED, "values", "policy"),
    "frozen reward model": (ValueScorer, HEADED, "scores", "policy"),
    "reference of comparisons": (CompletionScorer, SOURCE, "completion_logprobs", "dpo"),
}


@pytest.mark.parametrize("name", SCORED)
def test_a_frozen_models_budget_grows_and_halves_where_memory_is_short(name: str):
    kind, source, method, rows = SCORED[name]
    fixed, auto = made(partial(kind, source), 16384), made(partial(kind, source), "auto")
    batch, auto.budget.tokens = batch_of(rows, 0), 2 * LEAST
    wanted = getattr(fixed, method)(batch)
    cut = auto.micro_batch_tokens
    auto.micro_batch_tokens = fails(cut, 0)
    torch.testing.assert_close(getattr(auto, method)(batch), wanted, rtol=0, atol=1e-5)
    assert auto.budget.failures == 1 and LEAST < auto.budget.tokens <= auto.budget.ceiling < 2 * LEAST
    auto.micro_batch_tokens = fails(cut, 0)
    auto.budget.tokens = LEAST
    with pytest.raises(RuntimeError, match="can't allocate"):
        getattr(auto, method)(batch)


def test_scoring_teaches_a_trained_models_budget_nothing():
    module = made(TRAINED["policy"], "auto", updates=9)
    module.budget.tokens = 2 * LEAST
    module.token_logprobs(batch_of("policy", 0))
    assert module.budget.tokens == 2 * LEAST
    module.micro_batch_tokens = fails(module.micro_batch_tokens, 0)
    module.token_logprobs(batch_of("policy", 0))
    assert module.budget.tokens == LEAST and module.budget.failures == 1


def rank(number, address, queue):
    def work():
        mesh = mesh_of(host_of_rank(), (1, 2, 1, 1))
        return {name: on_mesh(name, mesh, number) for name in ("sft", "dpo")}

    as_rank(work, 2, number, address, queue)


def on_mesh(name, mesh, number):
    """Weights after three steps on half of the rows each, with a fixed budget and with budgets of the ranks' own."""
    found = {}
    for tokens in (16384, "auto"):
        module = made(TRAINED[name], tokens, mesh, updates=9)
        taken = []
        for step in range(3):
            batch = batch_of(name, step)
            if tokens == "auto":
                module.budget.tokens = LEAST * (number + 1 + step)
                taken.append(module.micro_batch_tokens())
            mine = batch.rows(torch.arange(9 if name in COMPARED else 10)[number::2])
            if name in COMPARED:
                module.train_step(mine, 9.0)
            else:
                module.train_step(mine, float(batch.mask.sum()))
            module.optimizer_step()
        found[tokens] = [whole(p).numpy() for p in module.parameters()]
    return found, taken


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return found_by_ranks(rank, 2, tmp_path_factory.mktemp("gloo"))


@pytest.mark.slow  # two processes that import everything
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_ranks_take_the_smallest_budget_and_train_the_same_weights(ranks, name: str):
    (first, taken), (second, others) = (found[name] for _, found in ranks)
    assert taken == others == [LEAST, 2 * LEAST, 3 * LEAST]
    for a, b, c in zip(first[16384], first["auto"], second["auto"], strict=True):
        assert (b == c).all() and abs(a - b).max() <= 2e-6


def test_memory_that_is_short_on_a_mesh_is_the_steps_error():
    module = made(TRAINED["sft"], "auto", updates=9)
    module.backward = fails(module.backward, 0)
    module._mesh = object()  # the step gives up before it asks the mesh for anything
    module.micro_batch_tokens = lambda: LEAST
    module.agreed_count = lambda parts: parts
    module.compute_device = lambda: torch.device("cpu")
    module._ranks = lambda axis: 1
    with pytest.raises(RuntimeError, match="can't allocate"):
        module.train_step(batch_of("sft", 0), 9.0)
    assert SHORT and module.budget.failures == 0
