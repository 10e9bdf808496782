"""Oracle of sampling transforms."""

import numpy as np

from tests.oracle.base import at_row, f64
from tests.oracle.divergences import softmax


def _each_row(logits, *parameters):
    for row in np.ndindex(np.shape(logits)[:-1]):
        yield row, f64(logits)[row], *(at_row(p, row) for p in parameters)


def _ranked(x):
    return sorted(range(x.size), key=lambda i: (-x[i], i))


def temperature(logits, t):
    out = np.full(np.shape(logits), -np.inf)
    for row, x, heat in _each_row(logits, t):
        if heat == 0:
            out[row][_ranked(x)[0]] = 0.0
        else:
            out[row] = x / heat
    return out


def top_k(logits, k):
    out = np.full(np.shape(logits), -np.inf)
    for row, x, count in _each_row(logits, k):
        kept = _ranked(x)[: int(count)]
        out[row][kept] = x[kept]
    return out


def top_p(logits, p):
    out = np.full(np.shape(logits), -np.inf)
    for row, x, mass in _each_row(logits, p):
        probabilities, total, kept = softmax(x), 0.0, []
        for i in _ranked(x):
            kept.append(i)
            total += probabilities[i]
            if total >= mass and mass < 1.0:
                break
        out[row][kept] = x[kept]
    return out


def min_p(logits, p):
    out = np.full(np.shape(logits), -np.inf)
    for row, x, share in _each_row(logits, p):
        probabilities = softmax(x)
        kept = probabilities >= share * probabilities.max()
        out[row][kept] = x[kept]
    return out


def repetition_penalty(logits, seen, penalty):
    out = f64(logits).copy()
    for row, x, theta in _each_row(logits, penalty):
        for i in np.flatnonzero(seen[row]):
            out[row][i] = x[i] / theta if x[i] > 0 else x[i] * theta
    return out
