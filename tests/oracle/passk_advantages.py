"""Oracle of advantages for pass@k: every set of k answers is looked at."""

import itertools

import numpy as np

from tests.oracle.base import f64


def _groups(shape, valid, group_ids):
    for row in np.ndindex(shape[:-1]):
        ids = np.zeros(shape[-1], int) if group_ids is None else group_ids[row]
        for one in sorted(set(ids.tolist())):
            yield row, [i for i in range(shape[-1]) if ids[i] == one and (valid is None or valid[row][i])]


def passk_advantages(rewards, valid=None, *, scale=True, eps=1e-6, group_ids=None):
    r = f64(rewards)
    out = np.zeros_like(r)
    for row, members in _groups(r.shape, valid, group_ids):
        if len(members) > 1:
            second, best = sorted(members, key=lambda i: r[row][i])[-2:]
            gain = r[row][best] - r[row][second]
            out[row][best] = gain / (np.std(r[row][members], ddof=1) + eps) if scale else gain
    return out


def passk_analytic_advantages(rewards, valid=None, *, k, group_ids=None):
    r = f64(rewards)
    out = np.zeros_like(r)
    for row, members in _groups(r.shape, valid, group_ids):
        best = {chosen: max(r[row][i] for i in chosen) for chosen in itertools.combinations(members, k)}
        if len(set(best.values())) > 1:
            values = list(best.values())
            for i in members:
                own = [value for chosen, value in best.items() if i in chosen]
                out[row][i] = (np.mean(own) - np.mean(values)) / np.std(values)
    return out


def pass_at_k(correct, total, k):
    out = np.zeros(np.shape(correct))
    for place in np.ndindex(out.shape):
        c, n = int(correct[place]), int(total[place])
        drawn = list(itertools.combinations(range(n), min(k, n)))
        out[place] = np.mean([any(i < c for i in chosen) for chosen in drawn])
    return out
