"""Sentences of docs/dialects.md that a dialect or a recipe can be asked about."""

import jax.numpy as jnp
import numpy as np
import pytest

from rl_fn import Rollouts, dialects, recipes

GROUP = {
    "trl": dialects.trl({}),
    "verl": dialects.verl({"algorithm": {"adv_estimator": "grpo"}}),
    "openrlhf": dialects.openrlhf({"algo.advantage.estimator": "group_norm", "algo.kl.init_coef": 0.0}),
    "tunix": dialects.tunix({}),
    "nemo_rl": dialects.nemo_rl({}),
    "rl_fn": recipes.grpo(),
}


def advantages(objective, rewards):
    """Of one group, one number a completion."""
    r = jnp.asarray([rewards], jnp.float32)
    return np.asarray(objective.advantages(Rollouts(r, jnp.ones((*r.shape, 2), bool))).advantages)[0, :, 0]


@pytest.mark.parametrize("name", GROUP)
def test_equal_rewards_have_no_advantage(name):
    assert (advantages(GROUP[name], [0.1] * 7) == 0).all()


@pytest.mark.parametrize(
    ("name", "value"), [("trl", 0.66), ("verl", 0.71), ("openrlhf", 0.71), ("tunix", 0.71), ("rl_fn", 0.71)]
)
def test_epsilon_shrinks_small_rewards(name, value):
    assert advantages(GROUP[name], [1e-3, -1e-3]).round(2) == pytest.approx([value, -value])


@pytest.mark.parametrize(("name", "value"), [("trl", 0.0), ("verl", 0.7), ("nemo_rl", 0.0), ("rl_fn", 0.0)])
def test_a_group_of_one(name, value):
    assert advantages(GROUP[name], [0.7]) == pytest.approx([value], abs=1e-5)


@pytest.mark.parametrize("name", ["openrlhf", "tunix"])
def test_a_group_of_one_is_refused(name):
    with pytest.raises(ValueError, match="> 1"):
        advantages(GROUP[name], [0.7])


def test_dr_grpo_divides_by_a_length_only_where_one_is_given():
    assert recipes.dr_grpo().aggregation.mode == "seq-mean-token-sum"
    assert recipes.dr_grpo(max_completion_length=8).aggregation.max_completion_length == 8


def test_defaults_that_differ_by_library():
    assert "cap=0.2" in dialects.trl({"loss_type": "cispo"}).explain()
    assert "at most −3A" in GROUP["verl"].explain()
    assert all("at most −3A" not in GROUP[name].explain() for name in ("trl", "openrlhf", "tunix", "nemo_rl"))
    assert "0.04·kl" in GROUP["tunix"].explain() and "kl = d," in GROUP["tunix"].explain()
