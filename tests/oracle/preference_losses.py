"""Oracle of losses on preferences: pairs, single completions, and reward models."""

import math

import numpy as np

from tests.oracle.base import f64
from tests.oracle.divergences import masked

# Oracle of losses of pairs and of single responses.


def _sigmoid(x):
    return 1 / (1 + np.exp(-f64(x)))


def _nll(z, smoothing=0.0):
    """Cross-entropy of a label that is right with probability 1 − smoothing."""
    return (1 - smoothing) * np.logaddexp(0, -f64(z)) + smoothing * np.logaddexp(0, f64(z))


def _delta(chosen, rejected, ref_chosen, ref_rejected):
    return f64(chosen) - f64(ref_chosen) - (f64(rejected) - f64(ref_rejected))


def dpo(chosen, rejected, ref_chosen, ref_rejected, mask=None, *, beta=0.1, label_smoothing=0.0):
    return masked(_nll(beta * _delta(chosen, rejected, ref_chosen, ref_rejected), label_smoothing), mask)


def dpo_robust(chosen, rejected, ref_chosen, ref_rejected, mask=None, *, beta=0.1, label_smoothing=0.1):
    z = beta * _delta(chosen, rejected, ref_chosen, ref_rejected)
    loss = ((1 - label_smoothing) * _nll(z) - label_smoothing * _nll(-z)) / (1 - 2 * label_smoothing)
    return masked(loss, mask)


def _mean(total, length):
    return np.array([t / n if n else 0.0 for t, n in zip(total.flat, f64(length).flat, strict=True)]).reshape(
        total.shape
    )


def dpo_norm(
    chosen, rejected, ref_chosen, ref_rejected, n_chosen, n_rejected, mask=None, *, beta=5.0, label_smoothing=0.0
):
    c = _mean(f64(chosen) - f64(ref_chosen), n_chosen)
    r = _mean(f64(rejected) - f64(ref_rejected), n_rejected)
    return masked(_nll(beta * (c - r), label_smoothing), mask)


def f_dpo(
    chosen,
    rejected,
    ref_chosen,
    ref_rejected,
    mask=None,
    *,
    divergence="reverse_kl",
    alpha=0.5,
    beta=0.1,
    label_smoothing=0.0,
):
    slope = {
        "reverse_kl": lambda u: np.log(u) + 1,
        "forward_kl": lambda u: -1 / u,
        "js": lambda u: np.log(2 * u / (1 + u)),
        "alpha": lambda u: (1 - u**-alpha) / alpha,
    }[divergence]
    c, r = np.exp(f64(chosen) - f64(ref_chosen)), np.exp(f64(rejected) - f64(ref_rejected))
    return masked(_nll(beta * slope(c) - beta * slope(r), label_smoothing), mask)


def rpo(chosen, rejected, ref_chosen, ref_rejected, lengths, mask=None, *, alpha=1.0, beta=0.1, label_smoothing=0.0):
    preference = _nll(beta * _delta(chosen, rejected, ref_chosen, ref_rejected), label_smoothing)
    return masked(preference - alpha * _mean(f64(chosen), lengths), mask)


def ipo(chosen, rejected, ref_chosen, ref_rejected, mask=None, *, beta=0.1):
    return masked((_delta(chosen, rejected, ref_chosen, ref_rejected) - 1 / (2 * beta)) ** 2, mask)


def hinge(chosen, rejected, ref_chosen, ref_rejected, mask=None, *, beta=0.1):
    return masked(np.maximum(0, 1 - beta * _delta(chosen, rejected, ref_chosen, ref_rejected)), mask)


def sppo(
    chosen, rejected, ref_chosen, ref_rejected, mask=None, *, beta=1e-3, chosen_win_rate=1.0, rejected_win_rate=0.0
):
    eta = 1 / beta
    c = f64(chosen) - f64(ref_chosen) - eta * (f64(chosen_win_rate) - 0.5)
    r = f64(rejected) - f64(ref_rejected) - eta * (f64(rejected_win_rate) - 0.5)
    return masked(c**2 + r**2, mask)


def discopop(chosen, rejected, ref_chosen, ref_rejected, mask=None, *, beta=0.05, tau=0.05):
    z = beta * _delta(chosen, rejected, ref_chosen, ref_rejected)
    blend = _sigmoid(z / tau)
    return masked((1 - blend) * _nll(z) + blend * np.exp(-z), mask)


def exo(chosen, rejected, ref_chosen, ref_rejected, mask=None, *, beta=0.1, label_smoothing=1e-3):
    """KL of the model's choice of the pair from the label, both as distributions over two responses."""
    scores = np.stack([f64(chosen) - f64(ref_chosen), f64(rejected) - f64(ref_rejected)]) * beta
    model = np.exp(scores) / np.exp(scores).sum(0)
    label = [1 - label_smoothing, label_smoothing]
    return masked(sum(model[i] * np.log(model[i] / label[i]) for i in range(2)), mask)


def nca(chosen, rejected, ref_chosen, ref_rejected, mask=None, *, beta=0.01):
    c, r = beta * (f64(chosen) - f64(ref_chosen)), beta * (f64(rejected) - f64(ref_rejected))
    return masked(-np.log(_sigmoid(c)) - sum(np.log(_sigmoid(-x)) for x in (c, r)) / 2, mask)


def bco(chosen, rejected, ref_chosen, ref_rejected, mask=None, *, beta=0.01, delta=0.0):
    c, r = beta * (f64(chosen) - f64(ref_chosen)), beta * (f64(rejected) - f64(ref_rejected))
    return masked(-np.log(_sigmoid(c - f64(delta))) - np.log(_sigmoid(-(r - f64(delta)))), mask)


def apo_zero(chosen, rejected, ref_chosen, ref_rejected, mask=None, *, beta=0.1):
    c, r = beta * (f64(chosen) - f64(ref_chosen)), beta * (f64(rejected) - f64(ref_rejected))
    return masked(1 - _sigmoid(c) + _sigmoid(r), mask)


def apo_down(chosen, rejected, ref_chosen, ref_rejected, mask=None, *, beta=0.1):
    c, r = beta * (f64(chosen) - f64(ref_chosen)), beta * (f64(rejected) - f64(ref_rejected))
    return masked(_sigmoid(c) + 1 - _sigmoid(c - r), mask)


def _quantile_pairs(u, v, mask):
    """u's entries less those of v with the same rank, one row at a time, counted entries only."""
    out = np.zeros(u.shape)
    for row in np.ndindex(u.shape[:-1]):
        counted = [i for i in range(u.shape[-1]) if mask is None or mask[row][i]]
        by_u = sorted(counted, key=lambda i, row=row: u[row][i])
        by_v = sorted(counted, key=lambda i, row=row: v[row][i])
        for i, j in zip(by_u, by_v, strict=True):
            out[row][i] = u[row][i] - v[row][j]
    return out


def aot(chosen, rejected, ref_chosen, ref_rejected, mask=None, *, beta=0.1, label_smoothing=0.0):
    u, v = f64(chosen) - f64(rejected), f64(ref_chosen) - f64(ref_rejected)
    return masked(_nll(beta * _quantile_pairs(u, v, mask), label_smoothing), mask)


def aot_unpaired(chosen, rejected, ref_chosen, ref_rejected, mask=None, *, beta=0.1, label_smoothing=0.0):
    u, v = f64(chosen) - f64(ref_chosen), f64(rejected) - f64(ref_rejected)
    return masked(_nll(beta * _quantile_pairs(u, v, mask), label_smoothing), mask)


def orpo(chosen, rejected, mask=None, *, lam=0.1):
    c, r = np.exp(f64(chosen)), np.exp(f64(rejected))
    ratio = (c / (1 - c)) / (r / (1 - r))
    return masked(-np.log(c) + lam * _nll(np.log(ratio)), mask)


def simpo(chosen, rejected, mask=None, *, beta=2.0, gamma=1.0):
    return masked(_nll(beta * f64(chosen) - beta * f64(rejected) - gamma), mask)


def cpo(chosen, rejected, mask=None, *, beta=0.1, alpha=1.0, label_smoothing=0.0):
    return masked(_nll(beta * (f64(chosen) - f64(rejected)), label_smoothing) - alpha * f64(chosen), mask)


def tpo(chosen, rejected, gold, mask=None, *, beta=0.01, alpha=1.0, gamma=0.0):
    return masked(_nll(beta * (f64(chosen) - f64(rejected)) - gamma) - alpha * f64(gold), mask)


def kto(logprobs, ref_logprobs, desirable, kl, mask=None, *, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0):
    """λ_y − v(x, y), the expectation's summand in the paper."""
    r, z = f64(logprobs) - f64(ref_logprobs), f64(kl)
    good = desirable_weight - desirable_weight * _sigmoid(beta * (r - z))
    bad = undesirable_weight - undesirable_weight * _sigmoid(beta * (z - r))
    return masked(np.where(desirable, good, bad), mask)


def kto_kl(logprobs, ref_logprobs, mask=None):
    ratios = (f64(logprobs) - f64(ref_logprobs))[... if mask is None else mask]
    return np.float64(max(0.0, ratios.mean()) if ratios.size else 0.0)


def wpo_weights(logprobs, mask=None, *, sum_squared_probs=None):
    x = f64(logprobs) - (0.0 if sum_squared_probs is None else np.log(f64(sum_squared_probs)))
    out = np.zeros(x.shape[:-1])
    for row in np.ndindex(out.shape):
        tokens = x[row] if mask is None else x[row][mask[row]]
        out[row] = math.exp(tokens.mean()) if tokens.size else 0.0
    return out


# Oracle of reward-model losses and of metrics of pairs.


def bradley_terry(chosen_rewards, rejected_rewards, mask=None, *, margin=0.0, center=0.0):
    c, r = f64(chosen_rewards), f64(rejected_rewards)
    p = 1 / (1 + np.exp(-(c - r - f64(margin))))
    return masked(-np.log(p) + center * (c + r) ** 2, mask)


def plackett_luce(rewards, mask=None):
    """Probability of drawing the candidates in this order without replacement."""
    r = f64(rewards)
    out = np.zeros(r.shape[:-1])
    for row in np.ndindex(out.shape):
        left = [
            math.exp(x)
            for x, counts in zip(r[row], np.ones(r.shape, bool)[row] if mask is None else mask[row], strict=True)
            if counts
        ]
        while left:
            out[row] -= math.log(left[0] / sum(left))
            left = left[1:]
    return out


def preference_metrics(chosen, rejected, ref_chosen, ref_rejected, mask=None, *, beta=0.1):
    c, r = beta * (f64(chosen) - f64(ref_chosen)), beta * (f64(rejected) - f64(ref_rejected))
    return tuple(masked(x, mask) for x in (c, r, c - r, np.where(c > r, 1.0, 0.0)))
