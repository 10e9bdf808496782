"""Advantages: from a critic, from a group, from a batch, corrected for off-policy tokens."""

from rl_fn.advantages.baselines import (
    gpg_advantages,
    leave_one_out_std_advantages,
    maxrl_advantages,
    opo_advantages,
    remax_advantages,
)
from rl_fn.advantages.group import grpo_advantages, rloo_advantages
from rl_fn.advantages.off_policy import clipped_importance_advantages, n_step, retrace, vtrace
from rl_fn.advantages.passk import pass_at_k, passk_advantages, passk_analytic_advantages
from rl_fn.advantages.returns import Advantages, discounted_returns, gae, length_adaptive_lambda, td_lambda, whiten
from rl_fn.advantages.token import optimal_token_baseline_advantages, step_group_advantages
from rl_fn.advantages.whitened import gdpo_advantages, reinforce_pp_advantages, reinforce_pp_baseline_advantages

__all__ = [
    "Advantages",
    "clipped_importance_advantages",
    "discounted_returns",
    "gae",
    "gdpo_advantages",
    "gpg_advantages",
    "grpo_advantages",
    "leave_one_out_std_advantages",
    "length_adaptive_lambda",
    "maxrl_advantages",
    "n_step",
    "opo_advantages",
    "optimal_token_baseline_advantages",
    "pass_at_k",
    "passk_advantages",
    "passk_analytic_advantages",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline_advantages",
    "remax_advantages",
    "retrace",
    "rloo_advantages",
    "step_group_advantages",
    "td_lambda",
    "vtrace",
    "whiten",
]
