"""Oracle of the group filter and the overlong penalty."""

import numpy as np

from tests.oracle.base import f64


def group_filter(rewards, valid=None, *, low=-np.inf, high=np.inf, group_ids=None):
    r = f64(rewards)
    exists = np.ones(r.shape, bool) if valid is None else valid
    out = np.zeros(r.shape, bool)
    for row in np.ndindex(r.shape[:-1]):
        for i in np.flatnonzero(exists[row]):
            group = [
                r[row][j]
                for j in np.flatnonzero(exists[row])
                if group_ids is None or group_ids[row][j] == group_ids[row][i]
            ]
            out[row][i] = low < np.mean(group) < high and len(set(group)) > 1
    return out


def overlong_penalty(lengths, *, max_length, buffer):
    def one(length):
        if length <= max_length - buffer:
            return 0.0
        return (max_length - buffer - length) / buffer if length <= max_length else -1.0

    return np.vectorize(one, otypes=[float])(lengths)
