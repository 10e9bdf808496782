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


def optimal_token_baseline_advantages(token_rewards, logprobs, sum_squared_probs, mask, *, gamma=1.0):
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


def step_group_advantages(rewards, state_ids, mask, *, gamma=0.95, weight=1.0, scale="group", eps=1e-6):
    r = f64(rewards)
    returns, out = _returns(r, mask, gamma), np.zeros_like(r)

    def relative(x, others):
        spread = np.std(others, ddof=1) if len(others) > 1 else 0.0
        return (x - np.mean(others)) / (spread + eps if scale == "group" else 1.0)

    for row in np.ndindex(r.shape[:-2]):
        steps = [(i, t) for i, t in np.ndindex(r.shape[-2:]) if mask[row][i][t]]
        totals = {i: sum(r[row][i][s] for j, s in steps if j == i) for i, _ in steps}
        for i, t in steps:
            alike = [returns[row][j][s] for j, s in steps if state_ids[row][j][s] == state_ids[row][i][t]]
            out[row][i][t] = relative(totals[i], list(totals.values())) + weight * relative(returns[row][i][t], alike)
    return out
