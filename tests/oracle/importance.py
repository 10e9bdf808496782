"""Oracle of importance weights."""

import math

import numpy as np

from tests.oracle.base import f64, rows


def log_ratio(logprobs, old_logprobs, mask, *, level="token", segment_ids=None):
    return at_level(f64(logprobs) - f64(old_logprobs), mask, level, segment_ids)


def at_level(d, mask, level, segment_ids=None):
    out = np.zeros_like(d)
    for row, positions in rows(mask, segment_ids):
        for t in positions:
            values = [d[row][s] for s in positions]
            out[row][t] = {"token": d[row][t], "sequence": np.mean(values), "sequence_sum": np.sum(values)}[level]
    return out


def truncated_importance_weights(log_ratios, mask, *, cap, level="token", segment_ids=None):
    return np.where(mask, np.minimum(np.exp(at_level(f64(log_ratios), mask, level, segment_ids)), cap), 0.0)


def masked_importance_weights(log_ratios, mask, *, low, high, level="token", segment_ids=None):
    w = np.exp(at_level(f64(log_ratios), mask, level, segment_ids))
    return np.where(mask & (w >= low) & (w <= high), w, 0.0)


def effective_sample_size(weights, mask):
    w = f64(weights)[mask]
    return np.sum(w) ** 2 / np.sum(w**2) if np.any(w > 0) else 0.0


def mismatch_metrics(logprobs, rollout_logprobs, mask, *, segment_ids=None):
    if not mask.any():
        return (0.0,) * 9
    new, rollout = f64(logprobs)[mask], f64(rollout_logprobs)[mask]
    w = np.exp(new - rollout)
    gap = np.abs(np.exp(new) - np.exp(rollout))
    perplexities = []
    for row, positions in rows(mask, segment_ids):
        if positions:
            mean = {name: np.mean(f64(x)[row][positions]) for name, x in (("π", logprobs), ("μ", rollout_logprobs))}
            perplexities.append(math.exp(-mean["π"]) / math.exp(-mean["μ"]))
    outside = [np.mean((w > bound) | (w < 1 / bound)) for bound in (2.0, 8.0)]
    return (
        np.mean(gap),
        np.max(gap),
        np.mean(-np.log(w)),
        np.mean(w - 1 - np.log(w)),
        np.mean(w**2) - 1,
        np.mean(perplexities),
        np.sum(w) ** 2 / np.sum(w**2) / w.size,
        *outside,
    )
