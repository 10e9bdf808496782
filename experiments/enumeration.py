"""A language so small that all of its sequences can be enumerated: expectations over rollouts are finite sums.

A policy is a table of logits, one row a prefix. Its sequences end with the end token or at the length limit, so their
lengths differ. The expectation over everything that can be sampled is a finite sum: what a table entry says about bias
is exact to float64 rounding, not a Monte Carlo estimate.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rl_fn

END = 0


class Language(NamedTuple):
    """All sequences over `vocabulary` tokens of at most `length`; END closes a sequence and counts.

    tokens `S T`, mask `S T`, rows `S T` (which row of the logits table each position reads).
    """

    tokens: np.ndarray
    mask: np.ndarray
    rows: np.ndarray
    prefixes: int


def language(vocabulary: int, length: int) -> Language:
    """Enumerate."""
    rows: dict[tuple[int, ...], int] = {}
    for t in range(length):
        for prefix in itertools.product(range(1, vocabulary), repeat=t):
            rows[prefix] = len(rows)
    sequences = [
        (*prefix, last) for prefix in rows for last in range(vocabulary) if last == END or len(prefix) == length - 1
    ]
    tokens = np.zeros((len(sequences), length), np.int32)
    mask = np.zeros(tokens.shape, bool)
    reads = np.zeros(tokens.shape, np.int32)
    for i, sequence in enumerate(sequences):
        for t, token in enumerate(sequence):
            tokens[i, t], mask[i, t], reads[i, t] = token, True, rows[sequence[:t]]
    return Language(tokens, mask, reads, len(rows))


def logits(lang: Language, vocabulary: int, seed: int, scale: float = 1.0) -> jax.Array:
    """A random policy."""
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=(lang.prefixes, vocabulary)))


def logprobs(lang: Language, table: jax.Array) -> jax.Array:
    """Log-probability of every token of every sequence, `S T`; 0 where there is none."""
    log_softmax = jax.nn.log_softmax(table, axis=-1)
    return jnp.where(lang.mask, log_softmax[lang.rows, lang.tokens], 0.0)


def probabilities(lang: Language, table: jax.Array) -> jax.Array:
    """Probability of every sequence, `S`; they sum to 1."""
    return jnp.exp(logprobs(lang, table).sum(-1))


class Sampled(NamedTuple):
    """All draws of an estimator: the probability of each and its gradient."""

    weights: jax.Array  # N
    gradients: jax.Array  # N P

    def mean(self) -> jax.Array:
        """The expected gradient."""
        return self.weights @ self.gradients

    def variance(self) -> jax.Array:
        """The trace of the gradient's covariance."""
        return self.weights @ jnp.square(self.gradients).sum(-1) - jnp.square(self.mean()).sum()


def beside(parts: Sequence[Sampled]) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of a step on several prompts that share no parameter: the gradients lie side by side."""
    means = jnp.concatenate([part.mean() for part in parts]) / len(parts)
    return means, sum((part.variance() for part in parts), start=jnp.zeros(())) / len(parts) ** 2


class Compared(NamedTuple):
    """An estimator's expected gradient g against the true one g*: scale = ⟨g, g*⟩/⟨g*, g*⟩, 1 if unbiased."""

    cosine: float
    scale: float
    error: float  # ‖g − g*‖ / ‖g*‖
    deviation: float  # √trace of the covariance / ‖g*‖


def compare(sampled: Sampled | Sequence[Sampled], truth: jax.Array) -> Compared:
    """Bias and noise in units of the true gradient; several prompts are weighted alike."""
    g, variance = beside([sampled] if isinstance(sampled, Sampled) else sampled)
    norm = jnp.linalg.norm(truth)
    along = jnp.vdot(g, truth)
    return Compared(
        float(along / jnp.maximum(jnp.linalg.norm(g) * norm, 1e-300)),
        float(along / norm**2),
        float(jnp.linalg.norm(g - truth) / norm),
        float(jnp.sqrt(jnp.maximum(variance, 0.0)) / norm),
    )


def single(lang: Language, table: jax.Array, sampler: jax.Array, loss: Callable[[jax.Array], jax.Array]) -> Sampled:
    """One answer a draw: `loss(logprobs of all sequences) → S`, drawn from `sampler`."""
    gradients = jax.jacobian(lambda x: loss(logprobs(lang, x)))(table)
    return Sampled(probabilities(lang, sampler), gradients.reshape(gradients.shape[0], -1))


def grouped(
    lang: Language,
    table: jax.Array,
    objective: rl_fn.Objective,
    rewards: jax.Array,
    group: int,
    *,
    sampler: jax.Array | None = None,
    old: jax.Array | None = None,
) -> Sampled:
    """A group of answers a draw, drawn from `sampler` (μ), through an objective; `old` is π_old. Default: on-policy."""
    sampler = table if sampler is None else sampler
    old_logprobs = logprobs(lang, table if old is None else old)
    rollout_logprobs, mask = logprobs(lang, sampler), jnp.asarray(lang.mask)
    draws = jnp.asarray(list(itertools.product(range(len(lang.tokens)), repeat=group)))

    def loss(x: jax.Array, draw: jax.Array) -> jax.Array:
        advantages = objective.advantages(rl_fn.Rollouts(rewards[draw], mask[draw])).advantages
        new = logprobs(lang, x)[draw]
        return objective(
            rl_fn.Batch(new, old_logprobs[draw], advantages, mask[draw], rollout_logprobs=rollout_logprobs[draw])
        )[0]

    gradients = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(table, draws)
    weights = probabilities(lang, sampler)[draws].prod(-1)
    return Sampled(weights, gradients.reshape(len(draws), -1))


def true_gradient(lang: Language, table: jax.Array, rewards: jax.Array) -> jax.Array:
    """∇ of −E[reward], flat."""
    return jax.grad(lambda x: -(probabilities(lang, x) @ rewards))(table).ravel()


def true_values(lang: Language, table: jax.Array, rewards: jax.Array) -> jax.Array:
    """V of the policy at every position's prefix, `S T`: the expected reward of the sequences that pass through."""
    passes = (lang.rows[:, :, None] == np.arange(lang.prefixes)) & lang.mask[:, :, None]
    p, visits = probabilities(lang, table), jnp.asarray(passes.any(1), table.dtype)
    values = ((p * rewards) @ visits) / (p @ visits)
    return jnp.where(lang.mask, values[lang.rows], 0.0)


def at_the_end(lang: Language, rewards: jax.Array) -> jax.Array:
    """Token rewards, `S T`: a sequence's reward on its last token."""
    last = np.arange(lang.mask.shape[-1]) == lang.mask.sum(-1, keepdims=True) - 1
    return jnp.where(last, rewards[:, None], 0.0)


def sequence_kl(lang: Language, p: jax.Array, q: jax.Array) -> jax.Array:
    """KL(p‖q) between distributions over whole sequences."""
    return probabilities(lang, p) @ (logprobs(lang, p) - logprobs(lang, q)).sum(-1)


def token_kl(lang: Language, visited: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """E over prefixes of `visited` of Σₜ KL(p(·|prefix)‖q(·|prefix)): what a per-token loss on given rollouts sees."""
    per_row = rl_fn.kl_categorical(p, q)
    return probabilities(lang, visited) @ jnp.where(lang.mask, per_row[lang.rows], 0.0).sum(-1)
