"""Oracle of reward-model losses and of metrics of pairs."""

import math

import numpy as np

from tests.oracle.base import f64
from tests.oracle.divergences import masked


def bradley_terry(chosen_rewards, rejected_rewards, mask=None, *, margin=0.0, center=0.0):
    c, r = f64(chosen_rewards), f64(rejected_rewards)
    p = 1 / (1 + np.exp(-(c - r - f64(margin))))
    return masked(-np.log(p) + center * (c + r) ** 2, mask)


def plackett_luce(rewards, mask=None):
    """Probability of drawing the candidates in this order without replacement."""
    r = f64(rewards)
    out = np.zeros(r.shape[:-1])
    for row in np.ndindex(out.shape):
        left = [
            math.exp(x)
            for x, counts in zip(r[row], np.ones(r.shape, bool)[row] if mask is None else mask[row], strict=True)
            if counts
        ]
        while left:
            out[row] -= math.log(left[0] / sum(left))
            left = left[1:]
    return out


def preference_metrics(chosen, rejected, ref_chosen, ref_rejected, mask=None, *, beta=0.1):
    c, r = beta * (f64(chosen) - f64(ref_chosen)), beta * (f64(rejected) - f64(ref_rejected))
    return tuple(masked(x, mask) for x in (c, r, c - r, np.where(c > r, 1.0, 0.0)))
