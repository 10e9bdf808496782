"""Oracle of divergences."""

import math

import numpy as np

from tests.oracle.base import f64


def masked(x, mask):
    return x if mask is None else np.where(mask, x, 0.0)


def kl_k1(logprobs, ref_logprobs, mask=None):
    return masked(f64(logprobs) - f64(ref_logprobs), mask)


def kl_k2(logprobs, ref_logprobs, mask=None):
    return kl_k1(logprobs, ref_logprobs, mask) ** 2 / 2


def kl_k3(logprobs, ref_logprobs, mask=None):
    d = kl_k1(logprobs, ref_logprobs, mask).astype(np.longdouble)
    return (np.exp(-d) + d - 1).astype(np.float64)


def kl_abs(logprobs, ref_logprobs, mask=None):
    return np.abs(kl_k1(logprobs, ref_logprobs, mask))


def kl_straight_through(value, gradient):
    return f64(value)


def softmax(x):
    e = np.exp(f64(x) - np.max(f64(x)))
    return e / e.sum()


def kl_categorical(logits, ref_logits):
    out = np.zeros(np.shape(logits)[:-1])
    for row in np.ndindex(out.shape):
        p, q = softmax(logits[row]), softmax(ref_logits[row])
        out[row] = sum(p_ * (math.log(p_ / q_) if q_ > 0 else math.inf) for p_, q_ in zip(p, q, strict=True) if p_ > 0)
    return out


def entropy(logits):
    out = np.zeros(np.shape(logits)[:-1])
    for row in np.ndindex(out.shape):
        out[row] = -sum(p * math.log(p) for p in softmax(logits[row]) if p > 0)
    return out
