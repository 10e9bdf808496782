"""Pure functions for RL post-training of language models."""

from rl_fn import pieces, recipes
from rl_fn.advantages import Advantages, discounted_returns, gae, length_adaptive_lambda, td_lambda, whiten
from rl_fn.aggregation import Ratio, aggregate, aggregate_parts, masked_mean, masked_sum, masked_var
from rl_fn.archive import ArchiveState, ParetoArchive, pareto_archive
from rl_fn.balancing import balance
from rl_fn.baselines import (
    gpg_advantages,
    leave_one_out_std_advantages,
    maxrl_advantages,
    opo_advantages,
    remax_advantages,
)
from rl_fn.batch import Batch, Rollouts
from rl_fn.batch_advantages import gdpo_advantages, reinforce_pp_advantages, reinforce_pp_baseline_advantages
from rl_fn.chunked_logprobs import linear_logprobs
from rl_fn.constraints import Lagrangian, LagrangianState, lagrangian
from rl_fn.controllers import (
    CoefState,
    Controller,
    EntropyState,
    PIDState,
    adaptive_entropy,
    exponential_kl,
    fixed_kl,
    linear_kl,
    pid_kl,
)
from rl_fn.corrections import off_policy_sequence_mask, rejection_mask, second_moment_mask, total_variation_mask
from rl_fn.covariance_losses import clip_cov, high_entropy_mask, kl_cov
from rl_fn.distillation import distillation_advantages, gkd, on_policy_distillation, top_k_distillation
from rl_fn.divergences import entropy, kl_abs, kl_categorical, kl_k1, kl_k2, kl_k3, kl_straight_through
from rl_fn.dpo_losses import dpo, dpo_norm, dpo_robust, f_dpo, rpo
from rl_fn.exact_divergences import forward_kl, jensen_shannon, kl_importance_corrected, reverse_kl, total_variation
from rl_fn.group_advantages import grpo_advantages, rloo_advantages
from rl_fn.group_tools import group_filter, overlong_penalty
from rl_fn.hypervolumes import hypervolume, hypervolume_contribution
from rl_fn.importance import (
    MismatchMetrics,
    effective_sample_size,
    log_ratio,
    masked_importance_weights,
    mismatch_metrics,
    truncated_importance_weights,
)
from rl_fn.logprobs import RowState, TokenLogprobs, finish, logits_logprobs, merge, row_state, sequence_logprobs
from rl_fn.margin_losses import discopop, hinge, ipo, sppo
from rl_fn.multi_objective import crowding_distance, pareto_mask, tchebycheff, weighted_sum
from rl_fn.objectives import Objective
from rl_fn.off_policy_advantages import clipped_importance_advantages, n_step, retrace, vtrace
from rl_fn.packing import pack, position_ids, segment_ids, zigzag_gather, zigzag_split
from rl_fn.passk_advantages import pass_at_k, passk_advantages, passk_analytic_advantages
from rl_fn.pieces import *  # noqa: F403
from rl_fn.policy_losses import clipped_tokens, entropy_bonus, ppo_clip, reinforce
from rl_fn.preference_losses import apo_down, apo_zero, bco, exo, nca
from rl_fn.quantization import Quantized, dequantize, quantize_fp8, quantize_int8, smooth_scales
from rl_fn.recipes import *  # noqa: F403
from rl_fn.recurrence import linear_recurrence
from rl_fn.reference_free_losses import cpo, orpo, simpo, tpo
from rl_fn.regularised_losses import dro, kimi, topr
from rl_fn.response_losses import kto, kto_kl, wpo_weights
from rl_fn.reward_model_losses import PreferenceMetrics, bradley_terry, plackett_luce, preference_metrics
from rl_fn.sampling import min_p, repetition_penalty, sample, temperature, top_k, top_p
from rl_fn.schedules import ScheduleState, scheduled_kl
from rl_fn.sequence_losses import gmpo, gspo, gspo_token, luspo, vespo
from rl_fn.token_baselines import optimal_token_baseline_advantages, step_group_advantages
from rl_fn.token_losses import cispo, decoupled_ppo, dppo, gpg_loss, sapo
from rl_fn.transport_losses import aot, aot_unpaired
from rl_fn.value_losses import value_clip, value_huber, value_loss

__version__ = "0.1.0"

__all__ = [
    "Advantages",
    "ArchiveState",
    "Batch",
    "CoefState",
    "Controller",
    "EntropyState",
    "Lagrangian",
    "LagrangianState",
    "MismatchMetrics",
    "Objective",
    "PIDState",
    "ParetoArchive",
    "PreferenceMetrics",
    "Quantized",
    "Ratio",
    "Rollouts",
    "RowState",
    "ScheduleState",
    "TokenLogprobs",
    "adaptive_entropy",
    "aggregate",
    "aggregate_parts",
    "aot",
    "aot_unpaired",
    "apo_down",
    "apo_zero",
    "balance",
    "bco",
    "bradley_terry",
    "cispo",
    "clip_cov",
    "clipped_importance_advantages",
    "clipped_tokens",
    "cpo",
    "crowding_distance",
    "decoupled_ppo",
    "dequantize",
    "discopop",
    "discounted_returns",
    "distillation_advantages",
    "dpo",
    "dpo_norm",
    "dpo_robust",
    "dppo",
    "dro",
    "effective_sample_size",
    "entropy",
    "entropy_bonus",
    "exo",
    "exponential_kl",
    "f_dpo",
    "finish",
    "fixed_kl",
    "forward_kl",
    "gae",
    "gdpo_advantages",
    "gkd",
    "gmpo",
    "gpg_advantages",
    "gpg_loss",
    "group_filter",
    "grpo_advantages",
    "gspo",
    "gspo_token",
    "high_entropy_mask",
    "hinge",
    "hypervolume",
    "hypervolume_contribution",
    "ipo",
    "jensen_shannon",
    "kimi",
    "kl_abs",
    "kl_categorical",
    "kl_cov",
    "kl_importance_corrected",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_straight_through",
    "kto",
    "kto_kl",
    "lagrangian",
    "leave_one_out_std_advantages",
    "length_adaptive_lambda",
    "linear_kl",
    "linear_logprobs",
    "linear_recurrence",
    "log_ratio",
    "logits_logprobs",
    "luspo",
    "masked_importance_weights",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "maxrl_advantages",
    "merge",
    "min_p",
    "mismatch_metrics",
    "n_step",
    "nca",
    "off_policy_sequence_mask",
    "on_policy_distillation",
    "opo_advantages",
    "optimal_token_baseline_advantages",
    "orpo",
    "overlong_penalty",
    "pack",
    "pareto_archive",
    "pareto_mask",
    "pass_at_k",
    "passk_advantages",
    "passk_analytic_advantages",
    "pid_kl",
    "plackett_luce",
    "position_ids",
    "ppo_clip",
    "preference_metrics",
    "quantize_fp8",
    "quantize_int8",
    "reinforce",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline_advantages",
    "rejection_mask",
    "remax_advantages",
    "repetition_penalty",
    "retrace",
    "reverse_kl",
    "rloo_advantages",
    "row_state",
    "rpo",
    "sample",
    "sapo",
    "scheduled_kl",
    "second_moment_mask",
    "segment_ids",
    "sequence_logprobs",
    "simpo",
    "smooth_scales",
    "sppo",
    "step_group_advantages",
    "tchebycheff",
    "td_lambda",
    "temperature",
    "top_k",
    "top_k_distillation",
    "top_p",
    "topr",
    "total_variation",
    "total_variation_mask",
    "tpo",
    "truncated_importance_weights",
    "value_clip",
    "value_huber",
    "value_loss",
    "vespo",
    "vtrace",
    "weighted_sum",
    "whiten",
    "wpo_weights",
    "zigzag_gather",
    "zigzag_split",
]
# The pieces of objectives and the recipes list their own names.
__all__ += pieces.__all__
__all__ += recipes.__all__
__all__.sort(key=lambda name: (not name.isupper(), not name[0].isupper(), name))  # pyright: ignore[reportUnsupportedDunderAll]
