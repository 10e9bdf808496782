"""Surrogates: where a formula holds something fixed (its sg[·]), the function whose slope the gradient is.

Each takes the positional arguments twice: `moving`, which the slope is taken in, and `held`, the same numbers inside
sg[·]. At moving = held the value is the function's own, or the docstring says what differs.
"""

import numpy as np

from tests.oracle.base import f64
from tests.oracle.distillation import on_policy_distillation as on_policy_loss
from tests.oracle.importance import log_ratio
from tests.oracle.policy_losses import ppo_clip
from tests.oracle.sequence_losses import topr as topr_loss
from tests.oracle.sequence_losses import vespo as vespo_loss
from tests.oracle.token_losses import cispo as cispo_loss
from tests.oracle.token_losses import dppo as dppo_loss


def _weighted_reinforce(loss, moving, held, options):
    """−sg(w) A log π: the held loss is linear in log π, so that it is scaled by moving / held."""
    new, held_new = f64(moving[0]), f64(held[0])
    assert (held_new != 0).all()
    return loss(*held, **options) / held_new * new


def cispo(moving, held, **options):
    return _weighted_reinforce(cispo_loss, moving, held, options)


def vespo(moving, held, **options):
    return _weighted_reinforce(vespo_loss, moving, held, options)


def topr(moving, held, **options):
    return _weighted_reinforce(topr_loss, moving, held, options)


def gspo_token(moving, held, *, segment_ids=None, **clips):
    """PPO's loss of sₜ = sg(s) π/sg(π)."""
    _, old, advantages, mask = held
    s = log_ratio(held[0], old, mask, level="sequence", segment_ids=segment_ids)
    s = s + np.where(mask, f64(moving[0]) - f64(held[0]), 0.0)
    return ppo_clip(s, np.zeros_like(s), advantages, mask, **clips)


def dppo(moving, held, *, ratio_cap, **options):
    """The value has min(ρ, cap), and the gradient sg(min(ρ, cap)) A ∇log π."""
    return dppo_loss(*held, ratio_cap=ratio_cap, **options) * (1.0 + f64(moving[0]) - f64(held[0]))


def on_policy_distillation(moving, held, **options):
    return _weighted_reinforce(on_policy_loss, moving, held, options)


def kl_straight_through(moving, held):
    """The value of the first, the slope of the second."""
    return f64(held[0]) - f64(held[1]) + f64(moving[1])
