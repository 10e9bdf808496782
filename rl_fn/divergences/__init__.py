"""Divergences between policies: estimated from sampled tokens, and exact over a vocabulary."""

from rl_fn.divergences.estimators import kl_abs, kl_importance_corrected, kl_k1, kl_k2, kl_k3, kl_straight_through
from rl_fn.divergences.exact import entropy, forward_kl, jensen_shannon, kl_categorical, reverse_kl, total_variation

__all__ = [
    "entropy",
    "forward_kl",
    "jensen_shannon",
    "kl_abs",
    "kl_categorical",
    "kl_importance_corrected",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_straight_through",
    "reverse_kl",
    "total_variation",
]
