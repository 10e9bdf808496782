"""Oracle of advantages from a group."""

import numpy as np

from tests.oracle.base import f64


def _std(x):
    return float(np.std(x, ddof=1)) if np.size(x) > 1 else 0.0


def grpo_advantages(rewards, valid=None, *, scale="group", eps=1e-6):
    r = f64(rewards)
    valid = np.ones(r.shape, bool) if valid is None else valid
    out = np.zeros_like(r)
    for row in np.ndindex(r.shape[:-1]):
        group = r[row][valid[row]]
        if group.size > 1:
            spread = {"group": _std(group) + eps, "batch": _std(r[valid]) + eps, "none": 1.0}[scale]
            out[row][valid[row]] = (group - group.mean()) / spread
    return out


def rloo_advantages(rewards, valid=None):
    r = f64(rewards)
    valid = np.ones(r.shape, bool) if valid is None else valid
    out = np.zeros_like(r)
    for row in np.ndindex(r.shape[:-1]):
        for i in np.flatnonzero(valid[row]):
            others = [r[row][j] for j in np.flatnonzero(valid[row]) if j != i]
            out[row][i] = r[row][i] - np.mean(others) if others else 0.0
    return out
