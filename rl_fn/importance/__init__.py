"""Importance weights of tokens and sequences, and masks that reject what is too far off-policy."""

from rl_fn.importance.ratios import (
    MismatchMetrics,
    effective_sample_size,
    log_ratio,
    masked_importance_weights,
    mismatch_metrics,
    truncated_importance_weights,
)
from rl_fn.importance.rejection import (
    off_policy_sequence_mask,
    rejection_mask,
    second_moment_mask,
    total_variation_mask,
)

__all__ = [
    "MismatchMetrics",
    "effective_sample_size",
    "log_ratio",
    "masked_importance_weights",
    "mismatch_metrics",
    "off_policy_sequence_mask",
    "rejection_mask",
    "second_moment_mask",
    "total_variation_mask",
    "truncated_importance_weights",
]
