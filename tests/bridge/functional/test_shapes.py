"""Shapes, reductions, sorting, indexing and contraction against JAX, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from rl_bridge.functional import from_jax
from tests.bridge.functional.both import Family, check, draw

SHAPES = st.sampled_from([(1, 4), (3, 5)])
SEEDS = st.integers(0, 3)

FLOAT = {
    # Shapes.
    "broadcast": lambda x: x - x[:, :1] + x[0],
    "broadcast_to": lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], 2, x.shape[1])),
    "broadcast_scalar": lambda x: x + jnp.broadcast_to(x[0, 0], x.shape),
    "reshape": lambda x: (x.reshape(-1), x.reshape(x.shape[1], x.shape[0]), x[..., None], x.reshape(1, *x.shape)),
    "transpose": lambda x: (x.T, jnp.swapaxes(x[None], 0, 2)),
    "squeeze": lambda x: jnp.squeeze(x[:, None, :] * 2.0, 1),
    "slices": lambda x: (x[:, 1:], x[:, :-1], x[::2], x[::-1], x[-1], x[:1, ::3]),
    "concatenate": lambda x: (jnp.concatenate([x, x[:, :1]], -1), jnp.stack([x, 2.0 * x]), jnp.append(x[0], x[:, 0])),
    "split": lambda x: jnp.split(jnp.concatenate([x, x], -1), 2, axis=-1),
    "roll": lambda x: jnp.roll(x, 1, axis=-1),
    "pad": lambda x: (jnp.pad(x, ((1, 2), (0, 1)), constant_values=3.0), jnp.pad(x, ((0, 0), (1, 0)))),
    "lax_pad": lambda x: (
        lax.pad(x, 1.5, ((1, 0, 2), (0, 2, 1))),
        lax.pad(jnp.concatenate([x, x]), x[0, 0], ((-1, 1, 0), (1, -1, 1))),
    ),
    "flip": lambda x: (jnp.flip(x), jnp.flip(x, -1)),
    "iota": lambda x: (
        x * jnp.arange(x.shape[1], dtype=x.dtype) + lax.broadcasted_iota(x.dtype, x.shape, 0),
        # Held along one axis, whole in what takes no broadcasting: also where the other axis has one place or two.
        *(
            jnp.concatenate([x, lax.broadcasted_iota(x.dtype, (x.shape[0], n), axis)], 1)
            for n in (1, 2)
            for axis in (0, 1)
        ),
    ),
    "tile": lambda x: jnp.tile(x, (2, 3)),
    "repeat": lambda x: jnp.repeat(x, 2, axis=0),
    "triangle": lambda x: jnp.tril(x) + jnp.eye(x.shape[0], x.shape[1], dtype=x.dtype),
    # Reductions.
    "sum": lambda x: (jnp.sum(x), jnp.sum(x, 0), jnp.sum(x, -1, keepdims=True), jnp.sum(jnp.sum(x, -1))),
    "sum_of_sum_read_twice": lambda x: (jnp.sum(x, -1), jnp.sum(jnp.sum(x, -1))),
    "mean": lambda x: (jnp.mean(x), jnp.mean(x, -1), jnp.var(x, axis=-1), jnp.std(x + 0.1 * x**3 + 5.0)),
    "max": lambda x: (jnp.max(x), jnp.max(x, 0), jnp.max(x, initial=0.25)),
    "min": lambda x: (jnp.min(x), jnp.min(x, -1)),
    "prod": lambda x: (jnp.prod(x), jnp.prod(x, -1)),
    "any_all": lambda x: (jnp.any(x > 0), jnp.all(x > 0, -1)),
    "argmax": lambda x: (jnp.argmax(x), jnp.argmax(x, -1), jnp.argmin(x, 0), jnp.argmax(x > 0, -1)),
    "logsumexp": lambda x: (jax.nn.logsumexp(x, -1), jax.nn.log_softmax(x), jax.nn.softmax(x, 0)),
    "norm": lambda x: jnp.sqrt(jnp.sum(jnp.square(x)) + 1.0),
    "cumsum": lambda x: (jnp.cumsum(x, -1), lax.cumsum(x, 1, reverse=True), jnp.cumsum(x)),
    "cumprod": lambda x: (jnp.cumprod(x, -1), lax.cumprod(x, 0, reverse=True)),
    "cummax": lambda x: (lax.cummax(x, 1), lax.cummax(x, 0, reverse=True), lax.cummin(x, 1)),
    "cumlogsumexp": lambda x: (lax.cumlogsumexp(x, 1), lax.cumlogsumexp(x, 1, reverse=True)),
    "median": lambda x: jnp.quantile(x + jnp.arange(x.shape[1], dtype=x.dtype) * 0.01, 0.3, axis=-1),
    # Order.
    "sort": lambda x: (jnp.sort(x), jnp.sort(x, 0), jnp.sort(x, descending=True)),
    "argsort": lambda x: (jnp.argsort(x), jnp.argsort(x, descending=True, stable=True)),
    "sort_by_two_keys": lambda x: lax.sort((jnp.round(x), x[:, ::-1], 2.0 * x), dimension=1, num_keys=2),
    "top_k": lambda x: lax.top_k(x, 1),
    "kth_largest": lambda x: jnp.where(x >= lax.top_k(x, 1)[0][..., -1:], x, -1.0),
    "rank": lambda x: jnp.argsort(jnp.argsort(x)),
    # Contraction.
    "matmul": lambda x: (x @ x.T, jnp.dot(x[0], x[-1]), x @ jnp.ones((x.shape[1], 2), x.dtype)),
    "einsum": lambda x: (jnp.einsum("ij,kj->ik", x, x), jnp.einsum("ij,ij->j", x, x), jnp.outer(x[0], x[0])),
    "batched": lambda x: jnp.einsum("bi,bj->bij", x, x),
    "wide_accumulator": lambda x: jnp.matmul(
        x.astype(jnp.bfloat16), x.T.astype(jnp.bfloat16), preferred_element_type=jnp.float32
    ),
    # Dynamic slices and static updates.
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (0, x.shape[1] - 1), (x.shape[0], 1)),
    "dynamic_index": lambda x: lax.dynamic_index_in_dim(x, jnp.argmax(x[0]), 1),
    "dynamic_update": lambda x: lax.dynamic_update_slice(x, 2.0 * x[:1], (jnp.argmax(x[:, 0]), jnp.int32(0))),
    "set": lambda x: (x.at[0].set(1.0), x.at[:, -1].set(x[:, 0]), x.at[0, 0].set(x[-1, -1])),
    "add": lambda x: (x.at[:, 0].add(x[:, -1]), x.at[0, 0].add(2.0)),
    "multiply": lambda x: x.at[0].multiply(3.0),
    "max_at": lambda x: x.at[:, 0].max(-x[:, 0] + 0.1),
    "min_at": lambda x: x.at[0, 0].min(-x[0, 0] + 0.1),
}
INDEXED = {
    "take": lambda x, i: (x[i], jnp.take(x, i, axis=0), jnp.take(x.T, i, axis=1, mode="clip")),
    "take_1d": lambda x, i: x[:, 0][i],
    "pairs": lambda x, i: x[i, jnp.arange(x.shape[0]) % x.shape[1]],
    "along_axis": lambda x, i: jnp.take_along_axis(x, jnp.clip(i, 0, x.shape[1] - 1)[:, None], axis=-1),
    "along_first": lambda x, i: jnp.take_along_axis(x, jnp.broadcast_to(i[:, None], x.shape), axis=0),
    "out_of_range": lambda x, i: jnp.nan_to_num(jnp.take(x, i + 2, axis=0, mode="fill"), nan=7.0),
    "filled": lambda x, i: x.at[i + 2].get(mode="fill", fill_value=-1.0),
    "negative": lambda x, i: x[-1 - i],
    "rows_of_windows": lambda x, i: jax.vmap(lambda row, k: lax.dynamic_slice(row, (k,), (1,)))(x, i),
    "rows_of_wide_windows": lambda x, i: jax.vmap(lambda row, k: lax.dynamic_slice(row, (k,), (2,)))(
        jnp.concatenate([x, 2.0 * x], 1), i
    ),
    "take_of_three": lambda x, i: (
        jnp.take(jnp.stack([x, 2.0 * x]), i, axis=1),
        jnp.take(jnp.stack([x, 2.0 * x]), i[:, None], axis=1),
        jnp.take(jnp.stack([x, 2.0 * x], -1), i, axis=0),
    ),
    "gathered_columns": lambda x, i: x[:, jnp.clip(i, 0, x.shape[1] - 1)],
    "scatter_set": lambda x, i: x.at[jnp.sort(i)[:1]].set(5.0),
    "scatter_add": lambda x, i: x.at[i].add(2.0 * x),
    "scatter_add_dropped": lambda x, i: x.at[i + 2].add(2.0 * x, mode="drop"),
    "scatter_max": lambda x, i: x + lax.stop_gradient(x).at[i].max(lax.stop_gradient(x[::-1])),
    "scatter_elements": lambda x, i: x.at[i, jnp.zeros_like(i)].add(x[:, 0]),
    "segment_sum": lambda x, i: (
        jax.ops.segment_sum(x, i, num_segments=3),
        jax.ops.segment_sum(x[:, 0], i, num_segments=2),
        jax.ops.segment_max(x[:, 0], i, num_segments=9)[i],
    ),
    "one_hot": lambda x, i: x * jax.nn.one_hot(i, x.shape[1], dtype=x.dtype),
    "bincount": lambda x, i: jnp.bincount(i, length=4),
}


def indices(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, shape[0], shape[0]).astype(np.int32)


FAMILIES = {
    "float": Family(FLOAT, lambda name, shape, seed: [draw(seed, shape)]),
    "indexed": Family(INDEXED, lambda name, shape, seed: [draw(seed, shape), indices(seed, shape)]),
}


@pytest.mark.parametrize(("family", "name"), [(f, name) for f, family in FAMILIES.items() for name in family.functions])
@given(shape=SHAPES, seed=SEEDS)
def test_as_in_jax(family, name, shape, seed):
    with jax.numpy_rank_promotion("allow"):
        FAMILIES[family].check(name, shape, seed)


@pytest.mark.parametrize("name", ["reshape", "transpose", "matmul", "einsum", "sum", "triangle", "median"])
def test_equal_sizes(name):
    with jax.numpy_rank_promotion("allow"):
        check(FLOAT[name], draw(1, (4, 4)), rtol=3e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (jnp.sum(x), jnp.sum(x, 0), jnp.mean(x[:0]), jnp.prod(x), jnp.max(x, initial=-jnp.inf)),
        lambda x: (x.T, x.reshape(-1), jnp.concatenate([x, x]), jnp.sort(x), jnp.cumsum(x, 0), x[:, 1:2]),
        lambda x: x @ x.T,
    ],
)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_zero_size(function, shape):
    check(function, np.zeros(shape, np.float32))


def test_sorting_puts_nan_last_and_keeps_the_order_of_ties():
    x = np.array([2.0, np.nan, 1.0, 2.0, -np.inf, np.nan, 1.0], np.float32)
    check(lambda x: (jnp.sort(x), jnp.argsort(x), lax.top_k(x, 4), jnp.argmax(x), jnp.argmin(x)), x, places=())


def test_searchsorted_puts_nan_last():
    x = np.array([-np.inf, -1.0, -0.0, 2.0, np.inf, np.nan], np.float32)
    query = np.array([np.nan, -np.inf, 0.0, 1.5, np.inf, -3.0], np.float32)
    for method in ("scan", "compare_all", "sort"):  # JAX needs the table's size as a number

        def both_sides(x, q, method=method):
            return tuple(jnp.searchsorted(x, q, side=side, method=method) for side in ("left", "right"))

        check(both_sides, x, query, places=(), lowered=from_jax(both_sides, dynamic=False))


def test_first_of_equal_entries_wins():
    x = np.array([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
    check(lambda x: (lax.top_k(x, 2), jnp.argmax(x, -1), jnp.argmin(x, -1)), x)
