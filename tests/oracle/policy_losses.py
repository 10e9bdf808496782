"""Oracle of policy and value losses."""

import numpy as np

from tests.oracle.base import f64
from tests.oracle.divergences import masked


def reinforce(logprobs, advantages, mask=None):
    return masked(-f64(advantages) * f64(logprobs), mask)


def ppo_clip(logprobs, old_logprobs, advantages, mask=None, *, clip_low=0.2, clip_high=0.2, dual_clip=None):
    a, ratio = f64(advantages), np.exp(f64(logprobs) - f64(old_logprobs))
    surrogate = np.minimum(ratio * a, np.clip(ratio, 1 - clip_low, 1 + clip_high) * a)
    if dual_clip is not None:
        surrogate = np.where(a < 0, np.maximum(surrogate, dual_clip * a), surrogate)
    return masked(-surrogate, mask)


def clipped_tokens(logprobs, old_logprobs, advantages, mask=None, **clips):
    """Clipped is where the loss stays put when logprobs move by a hair."""
    moved = [ppo_clip(f64(logprobs) + step, old_logprobs, advantages, mask, **clips) for step in (-1e-9, 1e-9)]
    moves = moved[0] != moved[1]
    return ~moves & (f64(advantages) != 0) & (True if mask is None else mask)


def entropy_bonus(entropies, mask=None):
    return masked(-f64(entropies), mask)


def value_loss(values, returns, mask=None):
    return masked((f64(values) - f64(returns)) ** 2, mask)


def value_clip(values, old_values, returns, mask=None, *, clip=0.5):
    v, old, r = f64(values), f64(old_values), f64(returns)
    held = old + np.clip(v - old, -clip, clip)
    return masked(np.maximum((v - r) ** 2, (held - r) ** 2), mask)


def value_huber(values, returns, mask=None, *, delta=1.0):
    e = np.abs(f64(values) - f64(returns))
    return masked(np.where(e <= delta, e**2 / 2, delta * (e - delta / 2)), mask)
