"""Oracle of log-probabilities."""

import math

import numpy as np

from tests.oracle.base import at_row, f64
from tests.oracle.importance import at_level


def _row(logits, row, temperature, softcap, allowed_tokens):
    x = f64(logits)[row]
    x = x if softcap is None else softcap * np.tanh(x / softcap)
    x = x / at_row(temperature, row)
    return x if allowed_tokens is None else np.where(np.broadcast_to(allowed_tokens, np.shape(logits))[row], x, -np.inf)


def logits_logprobs(logits, tokens, *, temperature=1.0, softcap=None, allowed_tokens=None):
    out = np.zeros((3, *np.shape(tokens)))
    for row in np.ndindex(np.shape(tokens)):
        x = _row(logits, row, temperature, softcap, allowed_tokens)
        lse = math.log(np.sum(np.exp(x - x.max()))) + x.max()
        p = np.exp(x - lse)
        out[(slice(None), *row)] = x[tokens[row]] - lse, -sum(q * math.log(q) for q in p if q > 0), lse
    return tuple(out)


def linear_logprobs(hidden, weight, tokens, *, bias=None, chunk=None, **options):
    logits = f64(hidden) @ f64(weight).T + (0.0 if bias is None else f64(bias))
    return logits_logprobs(logits, tokens, **options)


def row_state(logits, tokens, *, start=0, temperature=1.0, softcap=None, allowed_tokens=None):
    out = np.zeros((4, *np.shape(tokens)))
    for row in np.ndindex(np.shape(tokens)):
        x = _row(logits, row, temperature, softcap, allowed_tokens)
        e = np.exp(x - x.max())
        index = int(tokens[row]) - start
        target = x[index] if 0 <= index < x.size else -np.inf
        out[(slice(None), *row)] = (
            x.max(),
            e.sum(),
            sum((v - x.max()) * w for v, w in zip(x, e, strict=True) if w > 0),
            target,
        )
    return tuple(out)


def _raw(state):
    """(maximum, Σeˣ, Σ x eˣ, target): the sums without a reference point."""
    m, s, u, target = (f64(x) for x in state)
    return m, s * np.exp(m), (u + m * s) * np.exp(m), target


def merge_row_states(a, b):
    (m_a, s_a, u_a, y_a), (m_b, s_b, u_b, y_b) = _raw(a), _raw(b)
    m, s, u = np.maximum(m_a, m_b), s_a + s_b, u_a + u_b
    return m, s * np.exp(-m), (u - m * s) * np.exp(-m), np.maximum(y_a, y_b)


def finalize_row_state(state):
    _, s, u, target = _raw(state)
    return target - np.log(s), np.log(s) - u / s, np.log(s)


def sequence_logprobs(logprobs, mask, *, segment_ids=None):
    if segment_ids is None:
        return np.where(mask, f64(logprobs), 0.0).sum(axis=-1)
    return at_level(f64(logprobs), mask, "sequence_sum", segment_ids)
