import numpy as np

HOSTILE = {"do_sample": True, "temperature": 0.3, "top_k": 2, "top_p": 0.3, "min_p": 0.5, "repetition_penalty": 1.5}
HOSTILE |= {
    "no_repeat_ngram_size": 2,
    "suppress_tokens": [4, 5, 6, 7],
    "begin_suppress_tokens": [8, 9],
    "min_length": 9,
}
"""A folder's generation_config.json: none of it changes what is drawn."""


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
