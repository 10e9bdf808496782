"""Oracle of advantages from a group."""

import numpy as np

from tests.oracle.base import f64


def _std(x):
    return float(np.std(x, ddof=1)) if np.size(x) > 1 else 0.0


def _groups(shape, valid, group_ids):
    ids = np.zeros(shape, int) if group_ids is None else group_ids
    for row in np.ndindex(shape[:-1]):
        for one in np.unique(ids[row]):
            yield row, np.flatnonzero(valid[row] & (ids[row] == one))


def grpo_advantages(rewards, valid=None, *, scale="group", eps=1e-6, group_ids=None):
    r = f64(rewards)
    valid = np.ones(r.shape, bool) if valid is None else valid
    out = np.zeros_like(r)
    for row, i in _groups(r.shape, valid, group_ids):
        group = r[row][i]
        if group.size > 1:
            spread = {"group": _std(group) + eps, "batch": _std(r[valid]) + eps, "none": 1.0}[scale]
            out[row][i] = (group - group.mean()) / spread
    return out


def rloo_advantages(rewards, valid=None, *, group_ids=None):
    r = f64(rewards)
    valid = np.ones(r.shape, bool) if valid is None else valid
    out = np.zeros_like(r)
    for row, members in _groups(r.shape, valid, group_ids):
        for i in members:
            others = [r[row][j] for j in members if j != i]
            out[row][i] = r[row][i] - np.mean(others) if others else 0.0
    return out
