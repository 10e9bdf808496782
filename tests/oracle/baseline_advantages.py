"""Oracle of outcome advantages by other baselines."""

import numpy as np

from tests.oracle.base import f64


def groups(shape, valid, group_ids):
    """Yield (row, indices of one group's valid answers)."""
    valid = np.ones(shape, bool) if valid is None else valid
    ids = np.zeros(shape, int) if group_ids is None else group_ids
    for row in np.ndindex(shape[:-1]):
        for one in np.unique(ids[row]):
            yield row, np.flatnonzero((ids[row] == one) & valid[row])


def remax_advantages(rewards, greedy_rewards, valid=None):
    out = np.zeros(rewards.shape)
    for row in np.ndindex(rewards.shape):
        if valid is None or valid[row]:
            out[row] = f64(rewards)[row] - f64(greedy_rewards)[row[: greedy_rewards.ndim]]
    return out


def opo_advantages(rewards, lengths, valid=None, *, group_ids=None):
    r, length = f64(rewards), f64(lengths)
    out = np.zeros_like(r)
    for row, i in groups(r.shape, valid, group_ids):
        if length[row][i].sum() > 0:
            out[row][i] = r[row][i] - np.average(r[row][i], weights=length[row][i])
    return out


def gpg_advantages(rewards, valid=None, *, norm=1.0, alpha="informative", group_ids=None):
    r = f64(rewards)
    out, answers, informative = np.zeros_like(r), 0, 0
    for row, i in groups(r.shape, valid, group_ids):
        answers += len(i)
        if len(i):
            out[row][i] = (r[row][i] - r[row][i].mean()) / norm
            several = len(np.unique(r[row][i])) > 1
            informative += np.count_nonzero(r[row][i]) if alpha == "nonzero" else len(i) * several
    if alpha == "none":
        return out
    return out * answers / informative if informative else np.zeros_like(r)


def maxrl_advantages(rewards, valid=None, *, group_ids=None):
    r = f64(rewards)
    out = np.zeros_like(r)
    for row, i in groups(r.shape, valid, group_ids):
        if len(i) and r[row][i].mean() != 0:
            out[row][i] = r[row][i] / r[row][i].mean() - 1
    return out


def leave_one_out_std_advantages(rewards, valid=None, *, group_ids=None):
    r = f64(rewards)
    out = np.zeros_like(r)
    for row, i in groups(r.shape, valid, group_ids):
        for one in i:
            others = r[row][i[i != one]]
            if len(others):
                spread = others.std(ddof=1) if len(others) > 1 else 0.0
                out[row][one] = (r[row][one] - others.mean()) / (spread if spread > 0 else 1.0)
    return out
