"""Every recipe by name, every hyper-parameter as an option; what the job has no input for is refused."""

import inspect
from dataclasses import fields
from typing import get_args

import pytest
import tyro

import rl_fn
from rl_bridge.pipelines.objective import RECIPES, TERMS, Algorithm, ObjectiveConfig, require_rewards_alone

# What needs a critic, a teacher, greedy answers, several rewards or steps.
BEYOND = {"ppo", "vapo", "on_policy_distillation", "remax", "gdpo", "gigpo"}


def test_every_recipe_and_every_option_is_there():
    assert set(get_args(Algorithm)) == set(RECIPES)
    options = {name for recipe in RECIPES.values() for name in inspect.signature(recipe).parameters}
    assert {field.name for field in fields(ObjectiveConfig)} == options | {"algorithm", *TERMS}


@pytest.mark.parametrize("algorithm", RECIPES)
def test_an_algorithm_by_name_is_its_recipe(algorithm):
    objective = tyro.cli(ObjectiveConfig, args=["--algorithm", algorithm]).build()
    assert objective == RECIPES[algorithm]()
    if algorithm in BEYOND:
        with pytest.raises(ValueError, match="this job has one reward per answer"):
            require_rewards_alone(objective)
    else:
        require_rewards_alone(objective)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--algorithm", "gspo", "--clip-low", "0.1", "--dual-clip", "3"], rl_fn.components.GSPO(0.1, 4e-4, 3.0)),
        (["--algorithm", "sapo", "--tau-neg", "2"], rl_fn.components.SAPO(1.0, 2.0)),
        (["--algorithm", "dppo", "--divergence", "kl", "--threshold", "0.05"], rl_fn.components.DPPO(0.05, "kl")),
        (["--algorithm", "vespo", "--behaviour", "old"], rl_fn.components.VESPO(behaviour="old")),
    ],
)
def test_options_reach_the_pieces(words, expected):
    assert tyro.cli(ObjectiveConfig, args=words).build().loss == expected


def test_an_option_of_another_algorithm_is_refused():
    with pytest.raises(ValueError, match=r"sapo does not take these options.*clip_low"):
        ObjectiveConfig(algorithm="sapo", clip_low=0.1).build()
    with pytest.raises(ValueError, match="kl_coef in place of reward_kl_coef"):
        require_rewards_alone(ObjectiveConfig(algorithm="rloo", reward_kl_coef=0.1).build())
    noise = rl_fn.components.Custom(lambda batch: batch.noise, ("noise",))
    with pytest.raises(ValueError, match="reads noise, which this job does not have"):
        require_rewards_alone(rl_fn.recipes.dapo().replace(correction=noise))
