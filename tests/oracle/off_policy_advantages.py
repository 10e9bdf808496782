"""Oracle of off-policy advantages and n-step returns."""

import math

import numpy as np

from tests.oracle.base import at_row, f64, rows
from tests.oracle.returns import discounted_returns


def n_step(rewards, values, mask, *, n, gamma=1.0, bootstrap=0.0, segment_ids=None):
    r, v = f64(rewards), f64(values)
    advantages, returns = np.zeros_like(r), np.zeros_like(r)
    for row, positions in rows(mask, segment_ids):
        for i, t in enumerate(positions):
            taken = positions[i : i + n]
            after = v[row][positions[i + n]] if i + n < len(positions) else at_row(bootstrap, row)
            total = sum(gamma**k * r[row][s] for k, s in enumerate(taken)) + gamma ** len(taken) * after
            returns[row][t], advantages[row][t] = total, total - v[row][t]
    return advantages, returns


def vtrace(
    rewards,
    values,
    log_ratios,
    mask,
    *,
    gamma=1.0,
    rho_clip=1.0,
    c_clip=1.0,
    lam=1.0,
    bootstrap=0.0,
    segment_ids=None,
):
    r, v, d = f64(rewards), f64(values), f64(log_ratios)
    advantages, targets = np.zeros_like(r), np.zeros_like(r)
    for row, positions in rows(mask, segment_ids):
        end = at_row(bootstrap, row)
        following = [*(v[row][t] for t in positions[1:]), end]
        rho = [min(rho_clip, math.exp(d[row][t])) for t in positions]
        c = [lam * min(c_clip, math.exp(d[row][t])) for t in positions]
        deltas = [rho[i] * (r[row][t] + gamma * following[i] - v[row][t]) for i, t in enumerate(positions)]
        for i, t in enumerate(positions):
            # The paper's definition: a sum of temporal differences, each behind the product of the traces before it.
            targets[row][t] = v[row][t] + sum(
                gamma ** (j - i) * math.prod(c[i:j]) * deltas[j] for j in range(i, len(positions))
            )
        for i, t in enumerate(positions):
            after = targets[row][positions[i + 1]] if i + 1 < len(positions) else end
            advantages[row][t] = rho[i] * (r[row][t] + gamma * after - v[row][t])
    return advantages, targets


def retrace(rewards, values, log_ratios, mask, *, gamma=1.0, lam=1.0, c_clip=1.0, bootstrap=0.0, segment_ids=None):
    r, v, d = f64(rewards), f64(values), f64(log_ratios)
    advantages, returns = np.zeros_like(r), np.zeros_like(r)
    for row, positions in rows(mask, segment_ids):
        following = [*(v[row][t] for t in positions[1:]), at_row(bootstrap, row)]
        c = [lam * min(c_clip, math.exp(d[row][t])) for t in positions]
        deltas = [r[row][t] + gamma * following[i] - v[row][t] for i, t in enumerate(positions)]
        for i, t in enumerate(positions):
            advantages[row][t] = sum(
                gamma ** (j - i) * math.prod(c[i + 1 : j + 1]) * deltas[j] for j in range(i, len(positions))
            )
            returns[row][t] = advantages[row][t] + v[row][t]
    return advantages, returns


def clipped_importance_advantages(
    rewards, values, log_ratios, mask, *, gamma=1.0, clip_low=0.2, clip_high=0.2, segment_ids=None
):
    returns = discounted_returns(rewards, mask, gamma=gamma, segment_ids=segment_ids)
    weight = np.clip(np.exp(f64(log_ratios)), 1 - clip_low, 1 + clip_high)
    return np.where(mask, weight * returns - f64(values), 0.0), returns
