"""Oracle of exact divergences."""

import numpy as np

from tests.oracle.base import f64
from tests.oracle.divergences import kl_categorical, masked, softmax


def reverse_kl(logits, ref_logits):
    return kl_categorical(logits, ref_logits)


def forward_kl(logits, ref_logits):
    return kl_categorical(ref_logits, logits)


def _pairs(logits, ref_logits):
    for row in np.ndindex(np.shape(logits)[:-1]):
        yield row, softmax(logits[row]), softmax(ref_logits[row])


def jensen_shannon(logits, ref_logits, *, beta=0.5):
    out = np.zeros(np.shape(logits)[:-1])
    for row, q, p in _pairs(logits, ref_logits):
        m = beta * p + (1 - beta) * q
        for weight, x in ((beta, p), (1 - beta, q)):
            out[row] += weight * sum(x_ * np.log(x_ / m_) for x_, m_ in zip(x, m, strict=True) if x_ > 0)
    return out


def total_variation(logits, ref_logits):
    out = np.zeros(np.shape(logits)[:-1])
    for row, q, p in _pairs(logits, ref_logits):
        out[row] = sum(max(q_ - p_, 0.0) for q_, p_ in zip(q, p, strict=True))
    return out


def kl_importance_corrected(logprobs, old_logprobs, ref_logprobs, mask=None, *, log_clip=None):
    bound = np.inf if log_clip is None else log_clip
    log_rho = np.clip(f64(logprobs) - f64(old_logprobs), -bound, bound)
    d = np.clip(f64(logprobs) - f64(ref_logprobs), -bound, bound)
    return masked(np.exp(log_rho) * (np.exp(-d) + d - 1), mask)
