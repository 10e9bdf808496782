"""Oracle of the optimal token baseline and of GiGPO's advantages."""

import numpy as np

from tests.oracle.base import f64


def _returns(rewards, mask, gamma):
    out = np.zeros_like(rewards)
    for row in np.ndindex(rewards.shape[:-1]):
        after = 0.0
        for t in reversed(range(rewards.shape[-1])):
            if mask[row][t]:
                out[row][t] = after = rewards[row][t] + gamma * after
    return out


def _group_by_group(function, arrays, group_ids):
    """Each group alone, and its rows put back in their places."""
    out = np.zeros(arrays[0].shape)
    for row in np.ndindex(group_ids.shape[:-1]):
        for one in set(group_ids[row].tolist()):
            members = group_ids[row] == one
            out[row][members] = function(*(x[row][members] for x in arrays))
    return out


def optimal_token_baseline_advantages(
    token_rewards, logprobs, sum_squared_probs, mask, valid=None, *, gamma=1.0, group_ids=None
):
    mask = mask if valid is None else mask & valid[..., None]
    if group_ids is not None:
        return _group_by_group(
            lambda *x: optimal_token_baseline_advantages(*x, gamma=gamma),
            (token_rewards, logprobs, sum_squared_probs, mask),
            group_ids,
        )
    r, p, squares = f64(token_rewards), np.exp(f64(logprobs)), f64(sum_squared_probs)
    returns, out = _returns(r, mask, gamma), np.zeros_like(r)
    for row in np.ndindex(r.shape[:-2]):
        for t in range(r.shape[-1]):
            here = [i for i in range(r.shape[-2]) if mask[row][i][t]]
            energy = [
                sum(1 - 2 * p[row][i][s] + squares[row][i][s] for s in range(t + 1) if mask[row][i][s]) for i in here
            ]
            if sum(energy) > 0:
                baseline = sum(w * returns[row][i][t] for w, i in zip(energy, here, strict=True)) / sum(energy)
                for i in here:
                    out[row][i][t] = returns[row][i][t] - baseline
    return out


def step_group_advantages(
    rewards, state_ids, mask, valid=None, *, gamma=0.95, weight=1.0, scale="group", eps=1e-6, group_ids=None
):
    exists = mask.any(-1) if valid is None else valid
    if group_ids is not None:
        constants = {"gamma": gamma, "weight": weight, "scale": scale, "eps": eps}
        return _group_by_group(
            lambda *x: step_group_advantages(*x, **constants), (rewards, state_ids, mask, exists), group_ids
        )
    mask = mask & exists[..., None]
    r = f64(rewards)
    returns, out = _returns(r, mask, gamma), np.zeros_like(r)

    def relative(x, others):
        spread = np.std(others, ddof=1) if len(others) > 1 else 0.0
        return (x - np.mean(others)) / (spread + eps if scale == "group" else 1.0)

    for row in np.ndindex(r.shape[:-2]):
        steps = [(i, t) for i, t in np.ndindex(r.shape[-2:]) if mask[row][i][t]]
        totals = {i: sum(r[row][i][s] for j, s in steps if j == i) for i in np.flatnonzero(exists[row])}
        for i, t in steps:
            alike = [returns[row][j][s] for j, s in steps if state_ids[row][j][s] == state_ids[row][i][t]]
            out[row][i][t] = relative(totals[i], list(totals.values())) + weight * relative(returns[row][i][t], alike)
    return out
