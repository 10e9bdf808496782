"""Published algorithms as Objectives with their papers' constants; one that a component refuses is a ValueError.

`objective.replace(...)` sets the rest.
"""

from rl_fn.objectives.recipes.critic import decoupled_ppo, ppo, reinforce_pp, reinforce_pp_baseline, vapo
from rl_fn.objectives.recipes.group_relative import dapo, dr_grpo, gdpo, gigpo, grpo, grpo_passk, passk
from rl_fn.objectives.recipes.off_policy_recipes import dro, kimi, m2po, on_policy_distillation, topr
from rl_fn.objectives.recipes.reinforce_family import gpg, maxrl, opo, reinforce, remax, rloo
from rl_fn.objectives.recipes.sequence_ratio import gmpo, gspo, gspo_token, luspo, vespo
from rl_fn.objectives.recipes.trust_region import cispo, clip_cov, dppo, kl_cov, sapo

__all__ = [
    "cispo",
    "clip_cov",
    "dapo",
    "decoupled_ppo",
    "dppo",
    "dr_grpo",
    "dro",
    "gdpo",
    "gigpo",
    "gmpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "gspo",
    "gspo_token",
    "kimi",
    "kl_cov",
    "luspo",
    "m2po",
    "maxrl",
    "on_policy_distillation",
    "opo",
    "passk",
    "ppo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "sapo",
    "topr",
    "vapo",
    "vespo",
]
