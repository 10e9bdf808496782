"""Every function of rl_fn once more, from its paper, in float64 NumPy with plain loops; shares no code with rl_fn.

A function here has the name, the arguments and the meaning of its namesake. Named tuples are returned as plain tuples
in the same order.
"""

import math

import numpy as np


def _f(x):
    return np.asarray(x, dtype=np.float64)


def _rows(mask, segment_ids=None):
    """Yield (row index, positions of the counted tokens) for every sequence, packed or not; empty ones too."""
    for row in np.ndindex(mask.shape[:-1]):
        ids = np.zeros(mask.shape[-1], int) if segment_ids is None else segment_ids[row]
        for segment in dict.fromkeys(ids.tolist()):
            yield row, [t for t in range(mask.shape[-1]) if ids[t] == segment and mask[row][t]]


def _at(value, row):
    value = _f(value)
    return value[row] if value.ndim else float(value)


def linear_recurrence(decay, inputs, mask, *, init=0.0, segment_ids=None):
    b = _f(inputs)
    out = np.zeros_like(b)
    for row, positions in _rows(mask, segment_ids):
        x = _at(init, row)
        for t in reversed(positions):
            a = _at(decay, row)
            x = (a[t] if np.ndim(a) else a) * x + b[row][t]
            out[row][t] = x
    return out


def discounted_returns(rewards, mask, *, gamma=1.0, segment_ids=None):
    r = _f(rewards)
    out = np.zeros_like(r)
    for row, positions in _rows(mask, segment_ids):
        for i, t in enumerate(positions):
            out[row][t] = sum(gamma**k * r[row][s] for k, s in enumerate(positions[i:]))
    return out


def gae(rewards, values, mask, *, gamma=1.0, lam=1.0, bootstrap=0.0, segment_ids=None):
    r, v = _f(rewards), _f(values)
    advantages, returns = np.zeros_like(r), np.zeros_like(r)
    for row, positions in _rows(mask, segment_ids):
        following = [*(v[row][t] for t in positions[1:]), _at(bootstrap, row)]
        deltas = [r[row][t] + gamma * following[i] - v[row][t] for i, t in enumerate(positions)]
        for i, t in enumerate(positions):
            # Equation 16, the explicit sum.
            advantages[row][t] = sum((gamma * _at(lam, row)) ** k * d for k, d in enumerate(deltas[i:]))
            returns[row][t] = advantages[row][t] + v[row][t]
    return advantages, returns


def td_lambda(rewards, values, mask, *, gamma=1.0, lam=1.0, bootstrap=0.0, segment_ids=None):
    r, v = _f(rewards), _f(values)
    advantages, returns = np.zeros_like(r), np.zeros_like(r)
    for row, positions in _rows(mask, segment_ids):
        level, n = _at(lam, row), len(positions)
        for i, t in enumerate(positions):
            # The definition: n-step returns weighted (1 − λ)λⁿ⁻¹, the last one with what is left.
            total = 0.0
            for steps in range(1, n - i + 1):
                end = i + steps
                after = v[row][positions[end]] if end < n else _at(bootstrap, row)
                g = sum(gamma**k * r[row][positions[i + k]] for k in range(steps)) + gamma**steps * after
                total += (level ** (steps - 1) if end == n else (1 - level) * level ** (steps - 1)) * g
            returns[row][t], advantages[row][t] = total, total - v[row][t]
    return advantages, returns


def length_adaptive_lambda(lengths, *, alpha=0.05, minimum=None):
    lam = [0.0 if n == 0 else 1.0 - 1.0 / (alpha * n) for n in np.ravel(lengths)]
    lam = np.array(lam).reshape(np.shape(lengths))
    return lam if minimum is None else np.maximum(lam, minimum)


def whiten(x, mask, *, shift_mean=True, eps=1e-8):
    x = _f(x)
    kept = x[mask]
    out = np.zeros_like(x)
    if kept.size:
        var = kept.var(ddof=1) if kept.size > 1 else 0.0
        out[mask] = (kept - kept.mean()) / math.sqrt(var + eps) + (0.0 if shift_mean else kept.mean())
    return out


def _std(x):
    return float(np.std(x, ddof=1)) if np.size(x) > 1 else 0.0


def grpo_advantages(rewards, valid=None, *, scale="group", eps=1e-6):
    r = _f(rewards)
    valid = np.ones(r.shape, bool) if valid is None else valid
    out = np.zeros_like(r)
    for row in np.ndindex(r.shape[:-1]):
        group = r[row][valid[row]]
        if group.size > 1:
            spread = {"group": _std(group) + eps, "batch": _std(r[valid]) + eps, "none": 1.0}[scale]
            out[row][valid[row]] = (group - group.mean()) / spread
    return out


def rloo_advantages(rewards, valid=None):
    r = _f(rewards)
    valid = np.ones(r.shape, bool) if valid is None else valid
    out = np.zeros_like(r)
    for row in np.ndindex(r.shape[:-1]):
        for i in np.flatnonzero(valid[row]):
            others = [r[row][j] for j in np.flatnonzero(valid[row]) if j != i]
            out[row][i] = r[row][i] - np.mean(others) if others else 0.0
    return out


def log_ratio(logprobs, old_logprobs, mask, *, level="token", segment_ids=None):
    return _at_level(_f(logprobs) - _f(old_logprobs), mask, level, segment_ids)


def _at_level(d, mask, level, segment_ids=None):
    out = np.zeros_like(d)
    for row, positions in _rows(mask, segment_ids):
        for t in positions:
            values = [d[row][s] for s in positions]
            out[row][t] = {"token": d[row][t], "sequence": np.mean(values), "sequence_sum": np.sum(values)}[level]
    return out


def truncated_importance_weights(log_ratios, mask, *, cap, level="token", segment_ids=None):
    return np.where(mask, np.minimum(np.exp(_at_level(_f(log_ratios), mask, level, segment_ids)), cap), 0.0)


def masked_importance_weights(log_ratios, mask, *, low, high, level="token", segment_ids=None):
    w = np.exp(_at_level(_f(log_ratios), mask, level, segment_ids))
    return np.where(mask & (w >= low) & (w <= high), w, 0.0)


def effective_sample_size(weights, mask):
    w = _f(weights)[mask]
    return np.sum(w) ** 2 / np.sum(w**2) if np.any(w > 0) else 0.0


def mismatch_metrics(logprobs, rollout_logprobs, mask, *, segment_ids=None):
    if not mask.any():
        return (0.0,) * 9
    new, rollout = _f(logprobs)[mask], _f(rollout_logprobs)[mask]
    w = np.exp(new - rollout)
    gap = np.abs(np.exp(new) - np.exp(rollout))
    perplexities = []
    for row, positions in _rows(mask, segment_ids):
        if positions:
            mean = {name: np.mean(_f(x)[row][positions]) for name, x in (("π", logprobs), ("μ", rollout_logprobs))}
            perplexities.append(math.exp(-mean["π"]) / math.exp(-mean["μ"]))
    outside = [np.mean((w > bound) | (w < 1 / bound)) for bound in (2.0, 8.0)]
    return (
        np.mean(gap),
        np.max(gap),
        np.mean(-np.log(w)),
        np.mean(w - 1 - np.log(w)),
        np.mean(w**2) - 1,
        np.mean(perplexities),
        np.sum(w) ** 2 / np.sum(w**2) / w.size,
        *outside,
    )


def _masked(x, mask):
    return x if mask is None else np.where(mask, x, 0.0)


def kl_k1(logprobs, ref_logprobs, mask=None):
    return _masked(_f(logprobs) - _f(ref_logprobs), mask)


def kl_k2(logprobs, ref_logprobs, mask=None):
    return kl_k1(logprobs, ref_logprobs, mask) ** 2 / 2


def kl_k3(logprobs, ref_logprobs, mask=None):
    d = kl_k1(logprobs, ref_logprobs, mask).astype(np.longdouble)
    return (np.exp(-d) + d - 1).astype(np.float64)


def kl_abs(logprobs, ref_logprobs, mask=None):
    return np.abs(kl_k1(logprobs, ref_logprobs, mask))


def kl_straight_through(value, gradient):
    return _f(value)


def _softmax(x):
    e = np.exp(_f(x) - np.max(_f(x)))
    return e / e.sum()


def kl_categorical(logits, ref_logits):
    out = np.zeros(np.shape(logits)[:-1])
    for row in np.ndindex(out.shape):
        p, q = _softmax(logits[row]), _softmax(ref_logits[row])
        out[row] = sum(p_ * (math.log(p_ / q_) if q_ > 0 else math.inf) for p_, q_ in zip(p, q, strict=True) if p_ > 0)
    return out


def entropy(logits):
    out = np.zeros(np.shape(logits)[:-1])
    for row in np.ndindex(out.shape):
        out[row] = -sum(p * math.log(p) for p in _softmax(logits[row]) if p > 0)
    return out


def reinforce(logprobs, advantages, mask=None):
    return _masked(-_f(advantages) * _f(logprobs), mask)


def ppo_clip(logprobs, old_logprobs, advantages, mask=None, *, clip_low=0.2, clip_high=0.2, dual_clip=None):
    a, ratio = _f(advantages), np.exp(_f(logprobs) - _f(old_logprobs))
    surrogate = np.minimum(ratio * a, np.clip(ratio, 1 - clip_low, 1 + clip_high) * a)
    if dual_clip is not None:
        surrogate = np.where(a < 0, np.maximum(surrogate, dual_clip * a), surrogate)
    return _masked(-surrogate, mask)


def clipped_tokens(logprobs, old_logprobs, advantages, mask=None, **clips):
    """Clipped is where the loss stays put when logprobs move by a hair."""
    moved = [ppo_clip(_f(logprobs) + step, old_logprobs, advantages, mask, **clips) for step in (-1e-9, 1e-9)]
    moves = moved[0] != moved[1]
    return ~moves & (_f(advantages) != 0) & (True if mask is None else mask)


def entropy_bonus(entropies, mask=None):
    return _masked(-_f(entropies), mask)


def value_loss(values, returns, mask=None):
    return _masked((_f(values) - _f(returns)) ** 2, mask)


def value_clip(values, old_values, returns, mask=None, *, clip=0.5):
    v, old, r = _f(values), _f(old_values), _f(returns)
    held = old + np.clip(v - old, -clip, clip)
    return _masked(np.maximum((v - r) ** 2, (held - r) ** 2), mask)


def value_huber(values, returns, mask=None, *, delta=1.0):
    e = np.abs(_f(values) - _f(returns))
    return _masked(np.where(e <= delta, e**2 / 2, delta * (e - delta / 2)), mask)


def aggregate_parts(x, mask, mode, *, horizon=None, segment_ids=None):
    x = _f(x)
    if mode == "prompt-mean":
        means = [x[p][mask[p]].mean() for p in np.ndindex(x.shape[:-2]) if mask[p].any()]
        return float(np.sum(means)), float(len(means))
    sequences = [[x[row][t] for t in positions] for row, positions in _rows(mask, segment_ids) if positions]
    tokens = float(sum(len(s) for s in sequences))
    total = float(sum(sum(s) for s in sequences))
    count = float(len(sequences))
    return {
        "token-mean": (total, tokens),
        "token-sum": (total, 0.0),
        "seq-mean-token-sum": (total, count),
        "seq-mean-token-mean": (float(sum(np.mean(s) for s in sequences)), count),
        "seq-mean-token-sum-norm": (total, (horizon or 0) * count),
    }[mode]


def aggregate(x, mask, mode, *, denominator=None, horizon=None, segment_ids=None):
    total, count = aggregate_parts(x, mask, mode, horizon=horizon, segment_ids=segment_ids)
    count = count if denominator is None else float(denominator)
    return total / count if count else total


def _reduced(statistic, x, mask, axis):
    x = _f(x)
    if axis is None:
        return statistic(x[mask])
    x, mask = np.moveaxis(x, axis, -1), np.moveaxis(mask, axis, -1)
    return np.array([statistic(x[row][mask[row]]) for row in np.ndindex(x.shape[:-1])]).reshape(x.shape[:-1])


def masked_sum(x, mask, *, axis=None):
    return _reduced(np.sum, x, mask, axis)


def masked_mean(x, mask, *, axis=None):
    return _reduced(lambda kept: kept.mean() if kept.size else 0.0, x, mask, axis)


def masked_var(x, mask, *, axis=None, ddof=1):
    return _reduced(lambda kept: kept.var(ddof=ddof) if kept.size > ddof else 0.0, x, mask, axis)


def _row(logits, row, temperature, softcap, support):
    x = _f(logits)[row]
    x = x if softcap is None else softcap * np.tanh(x / softcap)
    x = x / _at(temperature, row)
    return x if support is None else np.where(np.broadcast_to(support, np.shape(logits))[row], x, -np.inf)


def logits_logprobs(logits, tokens, *, temperature=1.0, softcap=None, support=None):
    out = np.zeros((3, *np.shape(tokens)))
    for row in np.ndindex(np.shape(tokens)):
        x = _row(logits, row, temperature, softcap, support)
        lse = math.log(np.sum(np.exp(x - x.max()))) + x.max()
        p = np.exp(x - lse)
        out[(slice(None), *row)] = x[tokens[row]] - lse, -sum(q * math.log(q) for q in p if q > 0), lse
    return tuple(out)


def linear_logprobs(hidden, weight, tokens, *, bias=None, chunk=None, **options):
    logits = _f(hidden) @ _f(weight).T + (0.0 if bias is None else _f(bias))
    return logits_logprobs(logits, tokens, **options)


def row_state(logits, tokens, *, start=0, temperature=1.0, softcap=None, support=None):
    out = np.zeros((4, *np.shape(tokens)))
    for row in np.ndindex(np.shape(tokens)):
        x = _row(logits, row, temperature, softcap, support)
        e = np.exp(x - x.max())
        index = int(tokens[row]) - start
        target = x[index] if 0 <= index < x.size else -np.inf
        out[(slice(None), *row)] = x.max(), e.sum(), np.sum((x - x.max()) * e), target
    return tuple(out)


def _raw(state):
    """(maximum, Σeˣ, Σ x eˣ, target): the sums without a reference point."""
    m, s, u, target = (_f(x) for x in state)
    return m, s * np.exp(m), (u + m * s) * np.exp(m), target


def merge(a, b):
    (m_a, s_a, u_a, y_a), (m_b, s_b, u_b, y_b) = _raw(a), _raw(b)
    m, s, u = np.maximum(m_a, m_b), s_a + s_b, u_a + u_b
    return m, s * np.exp(-m), (u - m * s) * np.exp(-m), np.maximum(y_a, y_b)


def finish(state):
    _, s, u, target = _raw(state)
    return target - np.log(s), np.log(s) - u / s, np.log(s)


def sequence_logprobs(logprobs, mask, *, segment_ids=None):
    if segment_ids is None:
        return np.where(mask, _f(logprobs), 0.0).sum(axis=-1)
    return _at_level(_f(logprobs), mask, "sequence_sum", segment_ids)


def _each_row(logits, *parameters):
    for row in np.ndindex(np.shape(logits)[:-1]):
        yield row, _f(logits)[row], *(_at(p, row) for p in parameters)


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
        probabilities, total, kept = _softmax(x), 0.0, []
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
        probabilities = _softmax(x)
        kept = probabilities >= share * probabilities.max()
        out[row][kept] = x[kept]
    return out


def repetition_penalty(logits, seen, penalty):
    out = _f(logits).copy()
    for row, x, theta in _each_row(logits, penalty):
        for i in np.flatnonzero(seen[row]):
            out[row][i] = x[i] / theta if x[i] > 0 else x[i] * theta
    return out
