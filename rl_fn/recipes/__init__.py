"""Published algorithms as Objectives with their papers' constants; each piece is replaceable.

A recipe whose short name is already that of its loss ends in `_objective`.
"""

from rl_fn.recipes.critic import decoupled_ppo_objective, ppo, reinforce_pp, reinforce_pp_baseline, vapo
from rl_fn.recipes.group import dapo, dr_grpo, gdpo, gigpo, grpo
from rl_fn.recipes.off_policy import (
    dro_objective,
    kimi_objective,
    m2po,
    on_policy_distillation_objective,
    topr_objective,
)
from rl_fn.recipes.reinforce import gpg, maxrl, opo, reinforce_objective, remax, rloo
from rl_fn.recipes.sequence import (
    gmpo_objective,
    gspo_objective,
    gspo_token_objective,
    luspo_objective,
    vespo_objective,
)
from rl_fn.recipes.sets import grpo_passk, passk
from rl_fn.recipes.trust_region import (
    cispo_objective,
    clip_cov_objective,
    dppo_objective,
    kl_cov_objective,
    sapo_objective,
)

__all__ = [
    "cispo_objective",
    "clip_cov_objective",
    "dapo",
    "decoupled_ppo_objective",
    "dppo_objective",
    "dr_grpo",
    "dro_objective",
    "gdpo",
    "gigpo",
    "gmpo_objective",
    "gpg",
    "grpo",
    "grpo_passk",
    "gspo_objective",
    "gspo_token_objective",
    "kimi_objective",
    "kl_cov_objective",
    "luspo_objective",
    "m2po",
    "maxrl",
    "on_policy_distillation_objective",
    "opo",
    "passk",
    "ppo",
    "reinforce_objective",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "sapo_objective",
    "topr_objective",
    "vapo",
    "vespo_objective",
]
