"""Every recipe through from_jax: advantages, loss, metrics and gradient as JAX computes them."""

import jax
import numpy as np
import pytest

import rl_fn
from rl_bridge.functional import from_jax
from tests.bridge.functional.both import to_torch
from tests.rl_fn.recipe_batches import OBJECTIVES, advantages, batch, loss_alone, rollouts, run
from tests.rl_fn.registry import RECIPES

LOSSES = {loss_alone(OBJECTIVES[name]): name for name in RECIPES}


@pytest.mark.parametrize("objective", LOSSES, ids=list(LOSSES.values()))
def test_loss_and_gradient(objective):
    """Recipes that differ in their advantages alone have one loss, which is compared once."""
    of = batch(OBJECTIVES[LOSSES[objective]], 12)
    expected = run(objective, of)
    tensors = rl_fn.Batch(*(x if x is None else to_torch(x) for x in of))
    wanted = {name: getattr(tensors, name).requires_grad_() for name in ("logprobs", "entropies")}
    loss, metrics = from_jax(objective.parts)(tensors._replace(**wanted))
    loss.total.backward()
    for ours, theirs in zip(
        [*loss, *(x for name in expected.metrics for x in metrics[name])],
        jax.tree.leaves((expected.loss, list(expected.metrics.values()))),
        strict=True,
    ):
        np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=2e-5, atol=2e-6)
    for name, tensor in wanted.items():
        np.testing.assert_allclose(tensor.grad.numpy(), expected.gradient[name], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", [name for name in RECIPES if not OBJECTIVES[name].advantage.critic])
def test_advantages(name):
    objective = OBJECTIVES[name]
    read = rollouts(objective, 12)
    tensors = rl_fn.Rollouts(*(x if x is None else to_torch(x) for x in read))
    np.testing.assert_allclose(
        from_jax(objective.advantages)(tensors).advantages.numpy(), advantages(objective, read), rtol=2e-5, atol=2e-6
    )


@pytest.mark.parametrize("name", ["ppo", "vapo"])
def test_a_critic(name):
    objective = OBJECTIVES[name]
    read = rollouts(objective, 12)
    got = from_jax(objective.advantages)(rl_fn.Rollouts(*(x if x is None else to_torch(x) for x in read)))
    expected = objective.advantages(read)
    np.testing.assert_allclose(got.advantages.numpy(), expected.advantages, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(got.returns.numpy(), expected.returns, rtol=2e-5, atol=2e-6)
