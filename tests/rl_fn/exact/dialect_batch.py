"""A batch that reaches every branch of the dialects' components, and what their exact tests compare with."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rl_fn.objectives.batch import Batch

MASK = np.ones((4, 6), bool)
MASK[0, 4:] = MASK[1, :2] = MASK[1, 4] = MASK[3] = False
RNG = np.random.default_rng(117)
# Ratios between e⁻² and e², probabilities between 0.02 and 0.98, advantages of both signs.
OLD, NEW, ROLLOUT, REF = -RNG.uniform(0.02, 2.0, (4, *MASK.shape))
A, H = RNG.normal(size=MASK.shape), RNG.gamma(2.0, 0.5, MASK.shape)
NAMES = ("logprobs", "old_logprobs", "advantages", "rollout_logprobs", "ref_logprobs", "entropies")
ARRAYS: Any = {name: jnp.asarray(x, jnp.float32) for name, x in zip(NAMES, (NEW, OLD, A, ROLLOUT, REF, H), strict=True)}
BATCH: Any = Batch(mask=jnp.asarray(MASK), **ARRAYS)
D = NEW - OLD


def close(got, expected, rtol=2e-5):
    np.testing.assert_allclose(np.where(MASK, got, 0.0), np.where(MASK, expected, 0.0), rtol=rtol, atol=1e-6)


def per_sequence(x, total=False):
    """The mean (or sum) of each row's counted tokens, on each of them."""
    counts = np.ones((4, 1)) if total else np.maximum(MASK.sum(1, keepdims=True), 1)
    return np.broadcast_to((x * MASK).sum(1, keepdims=True) / counts, MASK.shape)


def clip(log_ratio, low, high, dual=math.inf):
    ratio = np.exp(log_ratio)
    loss = np.maximum(-ratio * A, -np.clip(ratio, 1 - low, 1 + high) * A)
    return np.where(A < 0, np.minimum(loss, -dual * A), loss)


def gradient(component, of=BATCH):
    return jax.grad(lambda x: jnp.sum(jnp.where(of.mask, component(of._replace(logprobs=x)), 0.0)))(of.logprobs)
