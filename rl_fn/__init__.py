"""Pure functions for RL post-training of language models."""

from rl_fn.advantages import Advantages, discounted_returns, gae, length_adaptive_lambda, td_lambda, whiten
from rl_fn.aggregation import Ratio, aggregate, aggregate_parts, masked_mean, masked_sum, masked_var
from rl_fn.archive import ArchiveState, ParetoArchive, pareto_archive
from rl_fn.balancing import balance
from rl_fn.batch import Batch
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
from rl_fn.divergences import entropy, kl_abs, kl_categorical, kl_k1, kl_k2, kl_k3, kl_straight_through
from rl_fn.group_advantages import grpo_advantages, rloo_advantages
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
from rl_fn.multi_objective import crowding_distance, pareto_mask, tchebycheff, weighted_sum
from rl_fn.objectives import Objective
from rl_fn.packing import pack, position_ids, segment_ids, zigzag_gather, zigzag_split
from rl_fn.pieces import (
    GAE,
    KL,
    Aggregation,
    Clip,
    Entropy,
    GroupNormalised,
    LeaveOneOut,
    MaskedImportance,
    RawReward,
    Reinforce,
    TruncatedImportance,
)
from rl_fn.policy_losses import clipped_tokens, entropy_bonus, ppo_clip, reinforce
from rl_fn.quantization import Quantized, dequantize, quantize_fp8, quantize_int8, smooth_scales
from rl_fn.recipes import dapo, dr_grpo, grpo, ppo, reinforce_objective, rloo
from rl_fn.recurrence import linear_recurrence
from rl_fn.sampling import min_p, repetition_penalty, sample, temperature, top_k, top_p
from rl_fn.schedules import ScheduleState, scheduled_kl
from rl_fn.value_losses import value_clip, value_huber, value_loss

__version__ = "0.1.0"

__all__ = [
    "GAE",
    "KL",
    "Advantages",
    "Aggregation",
    "ArchiveState",
    "Batch",
    "Clip",
    "CoefState",
    "Controller",
    "Entropy",
    "EntropyState",
    "GroupNormalised",
    "Lagrangian",
    "LagrangianState",
    "LeaveOneOut",
    "MaskedImportance",
    "MismatchMetrics",
    "Objective",
    "PIDState",
    "ParetoArchive",
    "Quantized",
    "Ratio",
    "RawReward",
    "Reinforce",
    "RowState",
    "ScheduleState",
    "TokenLogprobs",
    "TruncatedImportance",
    "adaptive_entropy",
    "aggregate",
    "aggregate_parts",
    "balance",
    "clipped_tokens",
    "crowding_distance",
    "dapo",
    "dequantize",
    "discounted_returns",
    "dr_grpo",
    "effective_sample_size",
    "entropy",
    "entropy_bonus",
    "exponential_kl",
    "finish",
    "fixed_kl",
    "gae",
    "grpo",
    "grpo_advantages",
    "hypervolume",
    "hypervolume_contribution",
    "kl_abs",
    "kl_categorical",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_straight_through",
    "lagrangian",
    "length_adaptive_lambda",
    "linear_kl",
    "linear_logprobs",
    "linear_recurrence",
    "log_ratio",
    "logits_logprobs",
    "masked_importance_weights",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "merge",
    "min_p",
    "mismatch_metrics",
    "pack",
    "pareto_archive",
    "pareto_mask",
    "pid_kl",
    "position_ids",
    "ppo",
    "ppo_clip",
    "quantize_fp8",
    "quantize_int8",
    "reinforce",
    "reinforce_objective",
    "repetition_penalty",
    "rloo",
    "rloo_advantages",
    "row_state",
    "sample",
    "scheduled_kl",
    "segment_ids",
    "sequence_logprobs",
    "smooth_scales",
    "tchebycheff",
    "td_lambda",
    "temperature",
    "top_k",
    "top_p",
    "truncated_importance_weights",
    "value_clip",
    "value_huber",
    "value_loss",
    "weighted_sum",
    "whiten",
    "zigzag_gather",
    "zigzag_split",
]
