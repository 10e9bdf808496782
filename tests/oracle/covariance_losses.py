"""Oracle of Clip-Cov, KL-Cov and the mask of high-entropy tokens."""

import math

import numpy as np

from tests.oracle.base import f64


def _first(scores, number):
    """The places of the smallest scores, and those that equal the last of them."""
    ordered = sorted(scores.values())[:number]
    return {place for place, score in scores.items() if ordered and score <= ordered[-1]}


def _covariances(logprobs, advantages, mask):
    new, a = f64(logprobs), f64(advantages)
    places = [tuple(int(x) for x in place) for place in np.argwhere(mask)]
    means = [np.mean([x[place] for place in places]) if places else 0.0 for x in (new, a)]
    return {place: (new[place] - means[0]) * (a[place] - means[1]) for place in places}


def _number(fraction, mask):
    return max(math.floor(fraction * mask.sum()), 1) if fraction > 0 else 0


def clip_cov(
    logprobs, old_logprobs, advantages, mask, noise=None, *, fraction=2e-4, cov_low=1.0, cov_high=5.0, clip_low=0.2,
    clip_high=0.2,
):  # fmt: skip
    a, ratio, out = f64(advantages), np.exp(f64(logprobs) - f64(old_logprobs)), np.zeros(mask.shape)
    scores = {}
    for place, cov in _covariances(logprobs, advantages, mask).items():
        held = np.clip(ratio[place], 1 - clip_low, 1 + clip_high) * a[place]
        out[place] = -min(ratio[place] * a[place], held)
        if cov_low < cov < cov_high and held >= ratio[place] * a[place]:
            scores[place] = -cov if noise is None else noise[place]
    for place in _first(scores, _number(fraction, mask)):
        out[place] = 0.0
    return out


def kl_cov(logprobs, old_logprobs, advantages, mask, *, fraction=2e-4, coef=1.0):
    d = f64(logprobs) - f64(old_logprobs)
    out = np.where(mask, -np.exp(d) * f64(advantages), 0.0)
    covariances = _covariances(logprobs, advantages, mask)
    for place in _first({place: -cov for place, cov in covariances.items()}, _number(fraction, mask)):
        out[place] += coef * abs(d[place])
    return out


def high_entropy_mask(entropies, mask, *, quantile=0.8):
    if not mask.any():
        return np.zeros(mask.shape, bool)
    return mask & (entropies >= np.quantile(entropies[mask], quantile, method="higher"))
