"""Oracle of controllers: coefficients that follow the KL divergence or the entropy, and multipliers of constraints."""

import math

# Oracle of controllers: the coefficient after each measurement, in plain Python.


def exponential_kl(measured, target, coef, *, up, down, low, high):
    coefs = []
    for kl in measured:
        if kl > target:
            coef *= up
        elif kl < target:
            coef *= down
        coef = min(max(coef, low), high)
        coefs.append(coef)
    return coefs


def linear_kl(measured, target, coef, *, horizon, samples, clip):
    coefs = []
    for kl in measured:
        if not math.isnan(kl):
            coef *= 1 + min(max((kl - target) / target, -clip), clip) * samples / horizon
        coefs.append(coef)
    return coefs


def pid_kl(measured, target, coef, *, kp, ki, kd, low, high):
    coefs, total, previous = [], 0.0, None
    for kl in measured:
        if math.isnan(kl):
            coefs.append(coefs[-1] if coefs else coef)
            continue
        e = (kl - target) / target
        fixed = coef + kp * e + kd * (0.0 if previous is None else e - previous)
        out = fixed + ki * (total + e)
        if out > high and e > 0:
            total = max(total, (high - fixed) / ki)
        elif out < low and e < 0:
            total = min(total, (low - fixed) / ki)
        else:
            total += e
        coefs.append(min(max(fixed + ki * total, low), high))
        previous = e
    return coefs


def adaptive_entropy(measured, target, coef, *, step, low, high):
    bonuses, bonus = [], 0.0
    for entropy in measured:
        if not math.isnan(entropy):
            coef += step if entropy < target else -step if entropy > target else 0.0
            coef = min(max(coef, low), high)
            bonus = coef if entropy <= target else 0.0
        bonuses.append(bonus)
    return bonuses


def scheduled_kl(kind, t, *, start, end, steps, warmup=0):
    if t >= steps:
        return end
    if t < warmup:
        return start * t / warmup
    s = (t - warmup) / (steps - warmup)
    return {
        "linear": start + (end - start) * s,
        "exponential": start * (end / start) ** s if start and end else None,
        "cosine": end + (start - end) * (1 + math.cos(math.pi * s)) / 2,
        "warmup_cosine": end + (start - end) * (1 + math.cos(math.pi * s)) / 2,
    }[kind]


# Oracle of the Lagrangian: plain loops.


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
