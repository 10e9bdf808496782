"""Oracle of policy losses of single tokens."""

import math

import numpy as np

from tests.oracle.base import f64
from tests.oracle.divergences import masked
from tests.oracle.policy_losses import ppo_clip, reinforce


def gpg_loss(logprobs, advantages, mask=None):
    return reinforce(logprobs, advantages, mask)


def decoupled_ppo(
    logprobs,
    proximal_logprobs,
    rollout_logprobs,
    advantages,
    mask=None,
    *,
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=None,
    weight_cap=None,
):
    weight = np.exp(f64(proximal_logprobs) - f64(rollout_logprobs))
    weight = np.minimum(weight, np.inf if weight_cap is None else weight_cap)
    clips = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    return weight * ppo_clip(logprobs, proximal_logprobs, advantages, mask, **clips)


def cispo(logprobs, old_logprobs, advantages, mask=None, *, clip_high, clip_low=None):
    low = -np.inf if clip_low is None else 1 - clip_low
    weight = np.clip(np.exp(f64(logprobs) - f64(old_logprobs)), low, 1 + clip_high)
    return masked(-weight * f64(advantages) * f64(logprobs), mask)


def sapo(logprobs, old_logprobs, advantages, mask=None, *, tau_pos=1.0, tau_neg=1.05):
    a, ratio = f64(advantages), np.exp(f64(logprobs) - f64(old_logprobs))
    tau = np.where(a > 0, tau_pos, tau_neg)
    return masked(-4 / tau / (1 + np.exp(-tau * (ratio - 1))) * a, mask)


def dppo(logprobs, old_logprobs, advantages, mask=None, *, threshold, divergence="tv", ratio_cap=None):
    a, p, q = f64(advantages), np.exp(f64(old_logprobs)), np.exp(f64(logprobs))
    out = np.zeros_like(a)
    for i in np.ndindex(a.shape):
        if mask is not None and not mask[i]:
            continue
        if divergence == "tv":
            distance = abs(p[i] - q[i])
        else:
            distance = p[i] * math.log(p[i] / q[i]) + (1 - p[i]) * math.log((1 - p[i]) / (1 - q[i]))
        leaving = (a[i] > 0 and q[i] > p[i]) or (a[i] < 0 and q[i] < p[i])
        ratio = min(q[i] / p[i], math.inf if ratio_cap is None else ratio_cap)
        out[i] = 0.0 if leaving and distance > threshold else -ratio * a[i]
    return out
