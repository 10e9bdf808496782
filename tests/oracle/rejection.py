"""Oracle of masks against drift."""

import math

import numpy as np

from tests.oracle.base import f64, rows


def rejection_mask(log_ratios, mask, *, threshold, statistic="k3", level="token", segment_ids=None):
    d = f64(log_ratios)
    out = np.zeros(mask.shape, bool)
    formulas = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.expm1(x) - x}
    for row, positions in rows(mask, segment_ids):
        values = [formulas[statistic](d[row][t]) for t in positions]
        for t, value in zip(positions, values, strict=True):
            size = {
                "token": abs(value),
                "seq_sum": abs(sum(values)),
                "seq_mean": abs(np.mean(values)),
                "seq_max": max(map(abs, values)),
            }[level]
            out[row][t] = size <= threshold
    return out


def off_policy_sequence_mask(advantages, logprobs, rollout_logprobs, mask, *, threshold, segment_ids=None):
    out = mask.copy()
    for row, positions in rows(mask, segment_ids):
        if positions and np.mean((f64(rollout_logprobs) - f64(logprobs))[row][positions]) > threshold:
            out[row][[t for t in positions if advantages[row][t] < 0]] = False
    return out


def second_moment_mask(log_ratios, mask, *, threshold):
    out, square = mask.copy(), f64(log_ratios) ** 2
    while out.any() and square[out].mean() > threshold:
        out &= square < square[out].max()
    return out


def total_variation_mask(advantages, logprobs, rollout_logprobs, mask, *, threshold, segment_ids=None):
    out, d = mask.copy(), f64(logprobs) - f64(rollout_logprobs)
    for row, positions in rows(mask, segment_ids):
        if positions and np.mean(np.abs(np.exp(d[row][positions]) - 1)) / 2 > threshold:
            out[row][[t for t in positions if advantages[row][t] * d[row][t] > 0]] = False
    return out
