"""Oracle of aggregation."""

import numpy as np

from tests.oracle.base import f64, rows


def aggregate_parts(x, mask, mode, *, max_completion_length=None, segment_ids=None):
    x = f64(x)
    if mode == "prompt-mean":
        means = [x[p][mask[p]].mean() for p in np.ndindex(x.shape[:-2]) if mask[p].any()]
        return float(np.sum(means)), float(len(means))
    sequences = [[x[row][t] for t in positions] for row, positions in rows(mask, segment_ids) if positions]
    tokens = float(sum(len(s) for s in sequences))
    total = float(sum(sum(s) for s in sequences))
    count = float(len(sequences))
    return {
        "token-mean": (total, tokens),
        "token-sum": (total, 0.0),
        "seq-mean-token-sum": (total, count),
        "seq-mean-token-mean": (float(sum(np.mean(s) for s in sequences)), count),
        "seq-mean-token-sum-norm": (total, (max_completion_length or 0) * count),
    }[mode]


def aggregate(x, mask, mode, *, denominator=None, max_completion_length=None, segment_ids=None):
    total, count = aggregate_parts(x, mask, mode, max_completion_length=max_completion_length, segment_ids=segment_ids)
    count = count if denominator is None else float(denominator)
    return total / count if count else total


def _reduced(statistic, x, mask, axis):
    x = f64(x)
    if axis is None:
        return statistic(x[mask])
    x, mask = np.moveaxis(x, axis, -1), np.moveaxis(mask, axis, -1)
    return np.array([statistic(x[row][mask[row]]) for row in np.ndindex(x.shape[:-1])]).reshape(x.shape[:-1])


def masked_sum(x, mask, *, axis=None):
    return _reduced(np.sum, x, mask, axis)


def masked_mean(x, mask, *, axis=None):
    return _reduced(lambda kept: kept.mean() if kept.size else 0.0, x, mask, axis)


def masked_var(x, mask, *, axis=None, ddof=1):
    return _reduced(lambda kept: kept.var(ddof=ddof) if kept.size > ddof else 0.0, x, mask, axis)
