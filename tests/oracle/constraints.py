"""Oracle of the Lagrangian: plain loops."""

import math


def violations(constraints, limits, directions):
    return [g - b if d == "<=" else b - g for g, b, d in zip(constraints, limits, directions, strict=True)]


def lagrangian_loss(multipliers, objective, constraints, limits, directions, penalty):
    total = objective
    for m, v in zip(multipliers, violations(constraints, limits, directions), strict=True):
        total += m * v + penalty / 2 * max(0.0, v) ** 2
    return total


def lagrangian_update(multipliers, constraints, limits, directions, lr, high):
    new = []
    for m, v in zip(multipliers, violations(constraints, limits, directions), strict=True):
        new.append(m if math.isnan(v) else min(high, max(0.0, m + lr * v)))
    return new
