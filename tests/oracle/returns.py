"""Oracle of the recurrence, and of returns and advantages from a critic."""

import math

import numpy as np

from tests.oracle.base import at_row, f64, rows


def linear_recurrence(decay, inputs, mask, *, init=0.0, segment_ids=None):
    b = f64(inputs)
    out = np.zeros_like(b)
    for row, positions in rows(mask, segment_ids):
        x = at_row(init, row)
        for t in reversed(positions):
            a = at_row(decay, row)
            x = (a[t] if np.ndim(a) else a) * x + b[row][t]
            out[row][t] = x
    return out


def discounted_returns(rewards, mask, *, gamma=1.0, segment_ids=None):
    r = f64(rewards)
    out = np.zeros_like(r)
    for row, positions in rows(mask, segment_ids):
        for i, t in enumerate(positions):
            out[row][t] = sum(gamma**k * r[row][s] for k, s in enumerate(positions[i:]))
    return out


def gae(rewards, values, mask, *, gamma=1.0, lam=1.0, bootstrap=0.0, segment_ids=None):
    r, v = f64(rewards), f64(values)
    advantages, returns = np.zeros_like(r), np.zeros_like(r)
    for row, positions in rows(mask, segment_ids):
        following = [*(v[row][t] for t in positions[1:]), at_row(bootstrap, row)]
        deltas = [r[row][t] + gamma * following[i] - v[row][t] for i, t in enumerate(positions)]
        for i, t in enumerate(positions):
            # Equation 16, the explicit sum.
            advantages[row][t] = sum((gamma * at_row(lam, row)) ** k * d for k, d in enumerate(deltas[i:]))
            returns[row][t] = advantages[row][t] + v[row][t]
    return advantages, returns


def td_lambda(rewards, values, mask, *, gamma=1.0, lam=1.0, bootstrap=0.0, segment_ids=None):
    r, v = f64(rewards), f64(values)
    advantages, returns = np.zeros_like(r), np.zeros_like(r)
    for row, positions in rows(mask, segment_ids):
        level, n = at_row(lam, row), len(positions)
        for i, t in enumerate(positions):
            # The definition: n-step returns weighted (1 − λ)λⁿ⁻¹, the last one with what is left.
            total = 0.0
            for steps in range(1, n - i + 1):
                end = i + steps
                after = v[row][positions[end]] if end < n else at_row(bootstrap, row)
                g = sum(gamma**k * r[row][positions[i + k]] for k in range(steps)) + gamma**steps * after
                total += (level ** (steps - 1) if end == n else (1 - level) * level ** (steps - 1)) * g
            returns[row][t], advantages[row][t] = total, total - v[row][t]
    return advantages, returns


def length_adaptive_lambda(lengths, *, alpha=0.05, minimum=None):
    lam = [0.0 if n == 0 else 1.0 - 1.0 / (alpha * n) for n in np.ravel(lengths)]
    lam = np.array(lam).reshape(np.shape(lengths))
    return lam if minimum is None else np.maximum(lam, minimum)


def whiten(x, mask, *, shift_mean=True, eps=1e-8):
    x = f64(x)
    kept = x[mask]
    out = np.zeros_like(x)
    if kept.size:
        var = kept.var(ddof=1) if kept.size > 1 else 0.0
        out[mask] = (kept - kept.mean()) / math.sqrt(var + eps) + (0.0 if shift_mean else kept.mean())
    return out
