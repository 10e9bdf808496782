"""Arguments and jitted functions for tests of the JAX operations: options are traced, so that cases share them."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import torch

from rl_kernels import in_jax
from tests.kernels.cases import INF, generator, ids, normal
from tests.kernels.exact import exact, gradients

# No multiple of any block, and several blocks of each kind.
ROWS, VOCAB_SIZE, HIDDEN_SIZE = 21, 300, 19
BACKENDS = in_jax.BACKENDS
BLOCKS = {
    ("logits", "pallas"): {"block_tokens": 8, "block_vocab": 128},
    ("logits", "pallas_gpu"): {"block_tokens": 4, "block_vocab": 16},
    ("linear", "pallas"): {"block_tokens": 8, "block_vocab": 128},
    # Backward blocks of 11 × 11.
    ("linear", "pallas_gpu"): {"block_tokens": 16, "block_vocab": 16, "workspace": 8 * 121},
}


def rows(value, dtype=torch.float64):
    return torch.full((ROWS,), value, dtype=dtype)


def masked():
    mask = rows(True, torch.bool)
    mask[[0, 4, 20]] = False
    return mask


def allowed():
    """Half of the entries, in row 2 none, and in row 3 one."""
    allowed = torch.rand(ROWS, VOCAB_SIZE, generator=generator(9)) < 0.5
    allowed[2:4] = False
    allowed[3, 299] = True
    return allowed


EVERY_ROW = rows(True, torch.bool)
CASES = {
    "plain": {"temperature": rows(1.0), "mask": EVERY_ROW},
    "temperatures": {"temperature": torch.linspace(0.01, 10.0, ROWS, dtype=torch.float64), "mask": EVERY_ROW},
    "some count": {"temperature": rows(0.7), "mask": masked()},
    "nothing counts": {"temperature": rows(1.0), "mask": rows(False, torch.bool)},
    "numbers": {"temperature": 0.7, "softcap": 2.0},
    "everything": {
        "temperature": torch.linspace(0.3, 2.0, ROWS, dtype=torch.float64),
        "softcap": 4.0,
        "logit_scale": 1.5,
        "allowed_tokens": allowed(),
        "mask": masked(),
    },
}


def floats(operation):
    """What is differentiated: float64 values that float32 has exactly."""
    if operation == "logits":
        logits = normal(ROWS, VOCAB_SIZE)
        logits[1, ::2] = -INF
        logits[5] = -INF
        logits[6] *= 20
        return [logits.float().double()]
    model = normal(VOCAB_SIZE, HIDDEN_SIZE, scale=1.0, seed=1), normal(VOCAB_SIZE, seed=2)
    return [x.float().double() for x in (normal(ROWS, HIDDEN_SIZE, scale=1.0), *model)]


def tokens(targets=None):
    """Ids [N], or [N, K] of which two are the same and one is no id."""
    if targets is None:
        return ids(ROWS, high=VOCAB_SIZE)
    several = ids(ROWS, targets, high=VOCAB_SIZE)
    several[:, -1] = several[:, 0]
    return several


def wanted(operation, leaves, drawn, options):
    """float64 outputs."""
    logits = leaves[0] if operation == "logits" else leaves[0] @ leaves[1].T + leaves[2]
    return exact(logits, drawn, **options)


def cotangents(targets=None):
    return (
        normal(*((ROWS,) if targets is None else (ROWS, targets)), seed=5),
        normal(ROWS, seed=6),
        normal(ROWS, seed=7),
    )


@cache
def compiled(operation, backend, statics):
    """Values and gradients: (floats, tokens, cotangents, traced options) → (values, gradients)."""
    fixed = dict(statics) | BLOCKS.get((operation, backend), {})

    def function(arrays, drawn, traced):
        if operation == "logits":
            return in_jax.logits_logprobs(arrays[0], drawn, backend=backend, **fixed, **traced)
        hidden, weight, *bias = arrays
        options = fixed | traced | ({"bias": bias[0]} if bias else {})
        return in_jax.linear_logprobs(hidden, weight, drawn, backend=backend, **options)

    def both(arrays, drawn, c, traced):
        values, pull = jax.vjp(lambda *a: tuple(function(a, drawn, traced)), *arrays)
        return values, pull(c)

    return jax.jit(both)


def as_jax(x, dtype=None):
    found = np.asarray(x.float() if x.is_floating_point() else x)
    return jnp.asarray(found.astype(np.int32) if found.dtype == np.int64 else found, dtype)


def run(operation, backend, leaves, drawn, options, targets=None, dtype=jnp.float32):
    statics = tuple((k, v) for k, v in options.items() if not isinstance(v, torch.Tensor))
    traced = {k: as_jax(v) for k, v in options.items() if isinstance(v, torch.Tensor)}
    arrays = tuple(as_jax(x.detach(), dtype) for x in leaves)
    c = tuple(as_jax(x) for x in cotangents(targets))
    return compiled(operation, backend, statics)(arrays, as_jax(drawn), c, traced)


def compare(found, leaves, outputs, targets=None, size=1.0):
    """Values and gradients with float64's; a row that is divided by a small temperature is rounded at its size."""
    values, pulled = found
    for a, b in zip(values, outputs, strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-5, atol=1e-5 * max(10.0, size))
    for a, b in zip(pulled, gradients(outputs, cotangents(targets), leaves), strict=True):
        largest = b.nan_to_num().abs().max().item()
        np.testing.assert_allclose(a, b.nan_to_num(), rtol=1e-5 * max(3.0, size), atol=max(1e-4, 3e-6 * size * largest))
