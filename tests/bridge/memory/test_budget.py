"""The token budget: it finds the room there is, and a step's result does not depend on it."""

import random

import pytest
import torch

from rl_bridge.memory.token_budget import LEAST, TokenBudget, in_use, is_out_of_memory, peak, room
from rl_bridge.models.small import TinySource
from rl_bridge.modules.policy import PolicyModule
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.pipelines.objective_options import objective_options
from rl_tools.plan.workload import Workload
from tests.bridge.memory.shortage import fails

BATCH = Workload(prompts=3, responses=2, prompt_tokens=4, new_tokens=6).batch(20)


@pytest.mark.parametrize("seed", range(10))
def test_it_fills_the_room_and_is_short_at_most_a_few_times(seed: int):
    rng, budget = random.Random(seed), TokenBudget()
    base, each, whole = rng.randrange(1, 40) << 20, rng.randrange(1 << 8, 1 << 14), 100 << 20
    failures = 0
    for step in range(200):
        needed = base + int(budget.tokens * each * rng.uniform(0.9, 1.1))
        if needed > whole:
            failures += 1
            assert budget.failed()
        else:
            budget.measured(base=base, peak=needed, room=whole, tokens=budget.tokens)
        if step > 100:
            assert 0.5 * (0.8 * whole - base) < budget.tokens * each < whole - base
    # The first budget is a guess; what was measured once never leads to a second shortage.
    assert failures <= 6


def test_it_shrinks_before_memory_is_short_and_learns_nothing_from_small_batches():
    budget = TokenBudget(tokens=1000)
    budget.measured(base=10, peak=95, room=100, tokens=1000)
    assert budget.tokens < 1000 and 10 + 0.085 * budget.tokens <= 80
    budget = TokenBudget(tokens=1000)
    budget.measured(base=10, peak=11, room=1000, tokens=100)
    assert budget.tokens == 1000
    for whole, tokens in ((0, 1000), (1, 800)):  # without room nothing was measured
        budget = TokenBudget(tokens=1000)
        budget.measured(base=0, peak=1, room=whole, tokens=1000)
        assert budget.tokens == tokens
    assert not TokenBudget(tokens=LEAST).failed()


def trained(tokens, broken=None) -> tuple[PolicyModule, float]:
    """A module after a step, and its gradient's norm; ``broken`` replaces methods to fail once."""
    scoring = ScoringConfig(micro_batch_tokens=tokens, share_prefixes=False)
    source, objective = TinySource(vocabulary=20, hidden=16, layers=1, heads=2), objective_options("dapo").build()
    with torch.device("meta"):
        module = PolicyModule(source, OptimizerConfig(learning_rate=1e-2), objective, updates=9, scoring=scoring)
    module.load_weights()
    module.on_weights_materialized()
    if broken is not None:
        broken(module)
    module.train_step(BATCH, float(BATCH.mask.sum()))
    return module, module.optimizer_step()["grad_norm"]


def in_forward(module):
    module.budget.tokens = LEAST * 2
    module._apart = fails(module._apart, 0)


def in_backward(module):
    module.budget.tokens = LEAST * 2
    module.backward = fails(module.backward, 0)


def at_the_optimizer(module):
    made = module.optimizer._init_group
    module.optimizer._init_group = fails(made, 0)


@pytest.mark.parametrize("broken", [in_forward, in_backward, at_the_optimizer])
def test_a_step_that_was_short_of_memory_is_done_again_with_the_same_result(broken):
    (whole, norm), (again, norm_again) = trained(16384), trained("auto", broken)
    assert again.budget is not None
    assert again.budget.failures == (0 if broken is at_the_optimizer else 1)
    # AdamW's first update does not tell a gradient from its double; the norm does.
    assert abs(norm_again / norm - 1) < 1e-5
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
    assert all(p.grad is None for p in again.parameters()) and again.weights_version() == 1


@pytest.mark.parametrize("tokens", [10, *(pytest.param(tokens, marks=pytest.mark.slow) for tokens in (25, 40))])
def test_a_steps_result_does_not_depend_on_the_budget(tokens: int):
    (whole, norm), (cut, norm_cut) = trained(16384), trained(tokens)
    assert abs(norm_cut / norm - 1) < 1e-5
    for a, b in zip(whole.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_an_update_that_began_is_not_made_twice_and_other_errors_are_raised():
    def begun(module):
        step = module.optimizer.step
        module.optimizer.step = fails(step, 0)

    with pytest.raises(RuntimeError, match="can't allocate"):
        trained("auto", begun)

    def wrong(module):
        module.backward = lambda loss: (_ for _ in ()).throw(RuntimeError("another"))

    with pytest.raises(RuntimeError, match="another"):
        trained("auto", wrong)


def test_what_is_measured_of_the_host():
    place = torch.device("cpu")
    assert 0 < in_use(place) <= room(place) and peak(place) >= 0.9 * in_use(place)
    with pytest.raises(RuntimeError) as short:
        torch.empty(1 << 50)
    assert is_out_of_memory(short.value) and not is_out_of_memory(ValueError("no"))
