"""Learning from a teacher: divergences between whole distributions, and a teacher's log-probabilities as a reward."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Float, Integer

from rl_fn._numerics import (
    POSITIVE,
    UNIT,
    Array,
    Constant,
    Mask,
    Number,
    Tokens,
    as_float,
    as_ids,
    has_shape,
    keep,
    known,
    log,
    numbers,
    require,
    same_shape,
)
from rl_fn._pairs import PairMask, softplus
from rl_fn.logprobs.row_state import log_softmax

Tail = Literal["bucket", "renormalise", "drop"]


def _kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """Σ p (log p − log q) over the last axis; +inf where p reaches what q excludes."""
    reached, allowed = log_p != -jnp.inf, log_q != -jnp.inf
    p = jnp.where(reached, jnp.exp(jnp.where(reached, log_p, 0.0)), 0.0)
    difference = jnp.where(reached & allowed, log_p, 0.0) - jnp.where(reached & allowed, log_q, 0.0)
    divergence = jnp.sum(p * difference, axis=-1)
    return jnp.where(jnp.any(reached & ~allowed & (p > 0), axis=-1), jnp.inf, divergence)


def _to_mixture(log_p: jax.Array, log_q: jax.Array, weight: Constant) -> jax.Array:
    """KL(p ‖ weight p + (1 − weight) q), as −Σ p [log weight + log(1 + e^{log q − log p} (1 − weight)/weight)]."""
    reached, allowed = log_p != -jnp.inf, log_q != -jnp.inf
    p = jnp.where(reached, jnp.exp(jnp.where(reached, log_p, 0.0)), 0.0)
    shared = reached & allowed
    difference = jnp.where(shared, log_q, 0.0) - jnp.where(shared, log_p, 0.0)
    added = jnp.where(shared, softplus(difference + log((1.0 - weight) / weight)), 0.0)
    return -jnp.sum(p * (log(weight) + added), axis=-1)


def _jensen_shannon(teacher: jax.Array, student: jax.Array, beta: Constant) -> jax.Array:
    """β KL(T‖M) + (1 − β) KL(S‖M), M = βT + (1 − β)S, of log-probabilities; the KLs themselves at 0 and 1."""
    if not known(beta):
        # A traced β may be at an end: all three are computed, and one is chosen.
        between = jnp.where((beta > 0) & (beta < 1), beta, 0.5)
        ends = jnp.where(beta <= 0, _kl(teacher, student), _kl(student, teacher))
        return jnp.where(between == beta, _mixed(teacher, student, between), ends)
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    return _mixed(teacher, student, beta)


def _mixed(teacher: jax.Array, student: jax.Array, beta: Constant) -> jax.Array:
    """Weigh the two divergences from the mixture, 0 < β < 1."""
    return beta * _to_mixture(teacher, student, beta) + (1 - beta) * _to_mixture(student, teacher, 1 - beta)


def _constants(x: jax.Array, beta: Number, temperature: Number) -> tuple[Constant, Constant]:
    """Check β and the temperature, for arithmetic with x."""
    (beta,) = numbers(x.dtype, UNIT, beta=beta)
    return beta, numbers(x.dtype, POSITIVE, temperature=temperature)[0]


def _counted(x: jax.Array, mask: Array | None) -> jax.Array:
    """Rows of the last axis, zero where masked."""
    return x if mask is None else keep(x, jnp.broadcast_to(jnp.asarray(mask)[..., None], x.shape))


def gkd(
    student_logits: Float[Array, "*batch V"],
    teacher_logits: Float[Array, "*batch V"],
    mask: PairMask | None = None,
    *,
    beta: Number = 0.5,
    temperature: Number = 1.0,
) -> Float[Array, "*batch"]:
    """Generalised knowledge distillation: a Jensen-Shannon divergence between teacher and student, at each token.

    β KL(T‖M) + (1 − β) KL(S‖M);  M = βT + (1 − β)S;  β = 0: KL(T‖S),  β = 1: KL(S‖T)

    The ends are set to the two KLs, as practice does: the expression itself tends to 0 there, and only divided by β (or
    1 − β) to the KL. No factor temperature² is applied.

    Args:
        student_logits: logits of S, `*batch V`; −inf excludes an entry.
        teacher_logits: logits of T, `*batch V`; no gradient is stopped here.
        mask: True where a token counts, `*batch`; without it every token does.
        beta: β in [0, 1].
        temperature: > 0, divides both logits.

    Returns:
        Divergence per token, `*batch`, ≥ 0 to rounding, zero where masked; for 0 < β < 1 at most the entropy of
        (β, 1 − β), at the ends +inf where one side reaches what the other excludes.

    Raises:
        ValueError: for β outside [0, 1] or a temperature that is not positive.

    Reference:
        Agarwal et al., arXiv 2306.13649, equation 1.

    >>> import jax.numpy as jnp
    >>> print(gkd(jnp.array([0.0, -jnp.inf]), jnp.array([-jnp.inf, 0.0])).round(4))
    0.6931

    """
    same_shape(student_logits=student_logits, teacher_logits=teacher_logits)
    has_shape(student_logits.shape[:-1], mask=mask)
    s, t = as_float(student_logits, teacher_logits)
    beta, temperature = _constants(s, beta, temperature)
    student, teacher = (log_softmax(_counted(x, mask) / temperature) for x in (s, t))
    return keep(_jensen_shannon(teacher, student, beta), mask)


def top_k_distillation(
    student_logits: Float[Array, "*batch V"],
    teacher_logprobs: Float[Array, "*batch K"],
    teacher_tokens: Integer[Array, "*batch K"],
    mask: PairMask | None = None,
    *,
    beta: Number = 0.0,
    temperature: Number = 1.0,
    tail: Tail = "bucket",
) -> Float[Array, "*batch"]:
    """Distillation from the K entries that a teacher reports, as an inference server does.

    gkd's divergence between T and S on the K entries and on what `tail` makes of the others:
    bucket: one more entry with all that is left;  renormalise: both scaled to 1 on the K entries;  drop: left out

    With K = V all three are gkd. "bucket" is a lower bound of it (merging entries never raises a divergence; KL(S‖T)
    takes a rest that rounding hides, of K float epsilons or less, for as many); "drop" may be negative and its gradient
    does not lower the student's other entries; "renormalise" does not see them.

    Args:
        student_logits: logits of S, `*batch V`.
        teacher_logprobs: log-probabilities of T, in nats, `*batch K`; −inf for an entry that T excludes.
        teacher_tokens: their token ids, different from each other in a row, `*batch K`; −1 pads a shorter report: the
            entry is left out on both sides, whatever its log-probability.
        mask: True where a token counts, `*batch`; without it every token does.
        beta: β in [0, 1]: 0 forward KL(T‖S), 1 reverse KL(S‖T), between them gkd's mixture.
        temperature: > 0, divides the student's logits; the teacher's are as reported.
        tail: "bucket", "renormalise" or "drop".

    Returns:
        Divergence per token, `*batch`, zero where masked.

    Raises:
        ValueError: for β outside [0, 1], a temperature that is not positive, an unknown tail or K > V.

    Reference:
        Agarwal et al., arXiv 2306.13649, equation 1, for the divergence; the three tails are those found in practice
        (TRL: bucket and renormalise, verl: drop).

    >>> import jax.numpy as jnp
    >>> p = jnp.log(jnp.array([0.5, 0.25]))
    >>> print(top_k_distillation(jnp.zeros(4), p, jnp.array([2, 0])).round(4))
    0.1733

    """
    require(tail in ("bucket", "renormalise", "drop"), f"unknown tail {tail!r}")
    size, count = student_logits.shape[-1], teacher_logprobs.shape[-1]
    require(count <= size, f"the teacher reports {count} entries of a vocabulary of {size}")
    has_shape(student_logits.shape[:-1], mask=mask)
    has_shape((*student_logits.shape[:-1], count), teacher_logprobs=teacher_logprobs, teacher_tokens=teacher_tokens)
    s, teacher = as_float(student_logits, teacher_logprobs)
    beta, temperature = _constants(s, beta, temperature)
    student, teacher = log_softmax(_counted(s, mask) / temperature), _counted(teacher, mask)
    ids = as_ids(teacher_tokens)
    # Garbage in a masked row may lie outside the vocabulary; the first K ids are inside and all different.
    spare = jnp.broadcast_to(jnp.arange(count, dtype=ids.dtype), ids.shape)
    ids = ids if mask is None else jnp.where(jnp.asarray(mask)[..., None], ids, spare)
    padding = ids == -1
    teacher = jnp.where(padding, -jnp.inf, teacher)
    reported = jnp.where(padding, -jnp.inf, jnp.take_along_axis(student, jnp.where(padding, 0, ids), axis=-1))
    if tail == "renormalise":
        teacher, reported = log_softmax(teacher), log_softmax(reported)
    elif tail == "bucket":
        # The size is no id: what is set there is dropped.
        rows = jnp.where(padding, size, ids).reshape(-1, count)
        there = jnp.zeros((rows.shape[0], size), bool).at[jnp.arange(rows.shape[0])[:, None], rows].set(True)
        there = there.reshape(student.shape)
        reported = jnp.concatenate([reported, _log_total(jnp.where(there, -jnp.inf, student))], axis=-1)
        left = 1.0 - jnp.sum(jnp.exp(teacher), axis=-1, keepdims=True)
        others = ~jnp.all(there, axis=-1, keepdims=True)
        # What rounding of a sum to 1 leaves over is no probability.
        rounding = jnp.asarray(count * float(jnp.finfo(teacher.dtype).eps), teacher.dtype)
        some = (left > rounding) & others
        # KL(S‖T) divides by it: entries that are there have at most so much, and none is known to be excluded.
        least = jnp.where(others & (beta == 1), jnp.log(rounding), -jnp.inf)
        teacher = jnp.concatenate([teacher, jnp.where(some, jnp.log(jnp.where(some, left, 1.0)), least)], axis=-1)
    return keep(_jensen_shannon(teacher, reported, beta), mask)


def _log_total(log_p: jax.Array) -> jax.Array:
    """Take log Σ p over the last axis, kept; −inf where there is nothing, with a finite gradient."""
    reached = log_p != -jnp.inf
    largest = jax.lax.stop_gradient(jnp.max(log_p, axis=-1, keepdims=True))
    base = jnp.where(largest != -jnp.inf, largest, 0.0)
    total = jnp.sum(jnp.where(reached, jnp.exp(jnp.where(reached, log_p - base, 0.0)), 0.0), axis=-1, keepdims=True)
    some = total != 0
    return jnp.where(some, base + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)


def distillation_advantages(
    logprobs: Tokens, teacher_logprobs: Tokens, mask: Mask | None = None, *, clip: Number | None = None
) -> Tokens:
    """Advantage of each sampled token from a teacher: minus the one-sample estimate of KL(π‖π_T).

    sg[log π_T − log π], held in [−clip, clip]

    Args:
        logprobs: log π of tokens that the student sampled, in nats, `*batch T`.
        teacher_logprobs: log π_T of the same tokens, `*batch T`; −inf gives −inf unless clipped.
        mask: True where a token counts, `*batch T`; without it every token does.
        clip: > 0, bound of the advantage; none by default.

    Returns:
        `*batch T`, without gradient, zero where masked.

    Raises:
        ValueError: for a clip that is not positive.

    Reference:
        Lu & Thinking Machines Lab, "On-Policy Distillation" (2025); Gu et al. (MiniLLM), arXiv 2306.08543, for the
        reverse KL by policy gradient.

    >>> import jax.numpy as jnp
    >>> distillation_advantages(jnp.array([-1.0]), jnp.array([-3.0])).tolist()
    [-2.0]

    """
    same_shape(logprobs=logprobs, teacher_logprobs=teacher_logprobs, mask=mask)
    new, teacher = as_float(logprobs, teacher_logprobs)
    advantages = jax.lax.stop_gradient(keep(teacher, mask) - keep(new, mask))
    if clip is None:
        return advantages
    (clip,) = numbers(new.dtype, POSITIVE, clip=clip)
    return jnp.clip(advantages, -clip, clip)


def on_policy_distillation(
    logprobs: Tokens, teacher_logprobs: Tokens, mask: Mask | None = None, *, clip: Number | None = None
) -> Tokens:
    """REINFORCE with the teacher's advantages: over the student's own samples, the gradient of KL(π‖π_T) per token.

    −sg[log π_T − log π] · log π

    The number is not the KL (that is minus the mean of distillation_advantages); only its gradient is meant. The later
    tokens' divergence is not credited to earlier tokens: discount 0, as in the reference.

    Args:
        logprobs: log π of tokens that the student sampled, in nats, `*batch T`.
        teacher_logprobs: log π_T of the same tokens, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.
        clip: > 0, bound of the advantage; none by default.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: for a clip that is not positive.

    Reference:
        Lu & Thinking Machines Lab, "On-Policy Distillation" (2025).

    >>> import jax.numpy as jnp
    >>> on_policy_distillation(jnp.array([-1.0]), jnp.array([-3.0])).tolist()
    [-2.0]

    """
    advantages = distillation_advantages(logprobs, teacher_logprobs, mask, clip=clip)
    return -advantages * keep(as_float(logprobs, teacher_logprobs)[0], mask)
