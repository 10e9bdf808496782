"""Oracle of policy losses of sequences."""

import math

import numpy as np

from tests.oracle.base import f64, rows
from tests.oracle.importance import log_ratio
from tests.oracle.policy_losses import ppo_clip


def gspo(logprobs, old_logprobs, advantages, mask, *, segment_ids=None, **clips):
    s = log_ratio(logprobs, old_logprobs, mask, level="sequence", segment_ids=segment_ids)
    return ppo_clip(s, np.zeros_like(s), advantages, mask, **clips)


def gspo_token(logprobs, old_logprobs, advantages, mask, **options):
    return gspo(logprobs, old_logprobs, advantages, mask, **options)


def luspo(logprobs, old_logprobs, advantages, mask, *, segment_ids=None, **clips):
    out = gspo(logprobs, old_logprobs, advantages, mask, segment_ids=segment_ids, **clips)
    for row, positions in rows(mask, segment_ids):
        out[row][positions] *= len(positions)
    return out


def gmpo(logprobs, old_logprobs, advantages, mask, *, clip_low=0.4, clip_high=0.4, segment_ids=None):
    d, a = f64(logprobs) - f64(old_logprobs), f64(advantages)
    out = np.zeros_like(d)
    for row, positions in rows(mask, segment_ids):
        logs = []
        for t in positions:
            sign = np.sign(a[row][t])
            logs.append(sign * min(sign * d[row][t], sign * np.clip(d[row][t], -clip_low, clip_high)))
        for t in positions:
            out[row][t] = -a[row][t] * math.exp(np.mean(logs))
    return out


def vespo(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    *,
    k_pos=2.0,
    lambda_pos=3.0,
    k_neg=3.0,
    lambda_neg=2.0,
    segment_ids=None,
):
    new, d, a = f64(logprobs), f64(logprobs) - f64(old_logprobs), f64(advantages)
    out = np.zeros_like(d)
    for row, positions in rows(mask, segment_ids):
        w = math.exp(sum(d[row][t] for t in positions))
        for t in positions:
            k, lam = (k_pos, lambda_pos) if a[row][t] >= 0 else (k_neg, lambda_neg)
            out[row][t] = -(math.exp(lam) * w**k * math.exp(-lam * w)) * a[row][t] * new[row][t]
    return out


def dro(logprobs, old_logprobs, advantages, mask, *, beta, level="token", segment_ids=None):
    new, d, a = f64(logprobs), f64(logprobs) - f64(old_logprobs), f64(advantages)
    out = np.zeros_like(d)
    for row, positions in rows(mask, segment_ids):
        for t in positions:
            whole = sum(d[row][s] for s in positions) ** 2 / len(positions)
            out[row][t] = -(a[row][t] * new[row][t] - beta / 2 * (d[row][t] ** 2 if level == "token" else whole))
    return out


def kimi(logprobs, old_logprobs, advantages, mask, *, tau, level="token", segment_ids=None):
    return dro(logprobs, old_logprobs, advantages, mask, beta=tau, level=level, segment_ids=segment_ids)


def topr(logprobs, old_logprobs, advantages, mask, *, level="sequence_sum", segment_ids=None):
    new, a = f64(logprobs), f64(advantages)
    rho = np.exp(log_ratio(logprobs, old_logprobs, mask, level=level, segment_ids=segment_ids))
    return np.where(mask, -np.where(a < 0, np.clip(rho, 0.0, 1.0), 1.0) * a * new, 0.0)
