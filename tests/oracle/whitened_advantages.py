"""Oracle of advantages normalised over the batch."""

import math

import numpy as np

from tests.oracle.base import f64, rows


def _groups(shape, valid, group_ids):
    """Yield (row, indices of one group's valid answers)."""
    for row in np.ndindex(shape[:-1]):
        members = {}
        for i in range(shape[-1]):
            if valid is None or valid[row][i]:
                members.setdefault(0 if group_ids is None else int(group_ids[row][i]), []).append(i)
        yield from ((row, indices) for indices in members.values())


def _whitened(x, counted, eps):
    out, kept = np.zeros_like(x), x[counted]
    if len(kept) > 1:
        out[counted] = (kept - kept.mean()) / math.sqrt(kept.var(ddof=1) + eps)
    return out


def reinforce_pp_advantages(token_rewards, mask, *, gamma=1.0, eps=1e-8, segment_ids=None):
    r = f64(token_rewards)
    returns = np.zeros_like(r)
    for row, positions in rows(mask, segment_ids):
        for i, t in enumerate(positions):
            returns[row][t] = sum(gamma**later * r[row][s] for later, s in enumerate(positions[i:]))
    return _whitened(returns, mask, eps)


def reinforce_pp_baseline_advantages(rewards, mask, valid=None, *, eps=1e-8, group_ids=None):
    r, centred = f64(rewards), np.zeros(mask.shape)
    for row, i in _groups(r.shape, valid, group_ids):
        for one in i:
            centred[row][one] = r[row][one] - np.mean(r[row][i])
    return _whitened(centred, mask if valid is None else mask & valid[..., None], eps)


def gdpo_advantages(rewards, weights=None, valid=None, *, eps=1e-6, group_ids=None):
    r = f64(rewards)
    answers = (*r.shape[:-2], r.shape[-1])
    total = np.zeros(answers)
    for row, i in _groups(answers, valid, group_ids):
        for k in range(r.shape[-2]):
            one = r[row][k][i]
            if len(one) > 1:
                weight = 1.0 if weights is None else float(weights[k])
                total[row][i] += weight * (one - one.mean()) / (one.std(ddof=1) + eps)
    return _whitened(total, np.ones(answers, bool) if valid is None else valid, eps)
