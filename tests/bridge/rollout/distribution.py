import numpy as np


def truncated(logits, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """The distribution that is sampled, in float64 NumPy: temperature, top-k, top-p, min-p, each on what is left."""
    x = np.asarray(logits, dtype=np.float64) / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if top_k is not None:
        p[order[top_k:]] = 0
        p /= p.sum()
    if top_p is not None:
        above = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
        p[order[above >= top_p]] = 0
        p /= p.sum()
    if min_p is not None:
        p[p < min_p * p.max()] = 0
        p /= p.sum()
    return p
