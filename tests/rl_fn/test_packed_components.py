"""Packed = padded over every loss, correction, KL estimate and aggregation of the components, at every level they have.

With NaN and −inf in one of the sequences too: the packed row has them where the padded rows have them, in value and
gradient, and a component that reads no statistic of the batch has them in that sequence alone. Generated over
rl_fn.components: a new component, and a new word of an old one, cannot escape.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from rl_fn.aggregation import MODES
from tests.rl_fn.component_table import CORRECTIONS, LOSSES
from tests.rl_fn.laws import quick_jit, weights
from tests.rl_fn.recipe_batches import COLUMNS, FLOATS, batch, mapped

WORDS = ("token", "sequence", "sequence_sum", "seq_sum", "seq_mean", "seq_max", "k1", "k2", "k3", "tv", "kl", "old")
ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+")
BAD = (1, 2)  # a counted token of the second sequence


def worded(name, component):
    """The component, and it with every word that one of its fields takes."""
    found = {name: component}
    for field in dataclasses.fields(component):
        if isinstance(getattr(component, field.name), str):
            for word in WORDS:
                try:
                    found[f"{name}-{field.name}={word}"] = dataclasses.replace(component, **{field.name: word})
                except ValueError:
                    continue  # not a word of this field
    return found


CALLED = {
    key: component
    for name, one in (LOSSES | CORRECTIONS).items()
    if one is not None
    for key, component in worded(name, one).items()
}
CALLED |= {f"KL-{estimator}": rl_fn.components.KL(estimator, 0.1).estimate for estimator in ESTIMATORS}


@functools.cache
def padded():
    of = batch(rl_fn.recipes.dapo(), 21)
    mask = of.mask.copy()
    mask[BAD] = True
    return of._replace(mask=mask)


def poisoned(field, value):
    of = padded()
    if field is None:
        return of
    spoiled = np.array(getattr(of, field))
    spoiled[BAD] = value
    return of._replace(**{field: spoiled})


def packed(of):
    ids = np.repeat(np.arange(len(of.mask), dtype=np.int32), COLUMNS)[None]
    return mapped(lambda x: np.reshape(x, (1, -1)), of)._replace(segment_ids=ids)


@functools.cache
def program(key):
    """Numbers per token, and the gradient of their weighted sum in every floating field."""

    def total(fields, of, shape):
        values = CALLED[key](of._replace(**fields))
        floats = values.astype(jnp.float32).reshape(shape)
        return jnp.sum(weights(floats) * floats), floats

    def both(of, shape):
        fields = {name: jnp.asarray(getattr(of, name)) for name in FLOATS}
        gradient, values = jax.grad(total, has_aux=True)(fields, of, shape)
        return values, {name: g.reshape(shape) for name, g in gradient.items()}

    return quick_jit(both, static_argnums=1)


SPOILS = [(None, 0.0)] + [(name, value) for name in FLOATS for value in (np.nan, -np.inf)]


def test_every_loss_and_correction_takes_packed_rows():
    assert [key for key, component in CALLED.items() if not getattr(component, "accepts_packed", True)] == []
    assert len(CALLED) > len(LOSSES | CORRECTIONS)


@pytest.mark.long
@pytest.mark.parametrize("key", CALLED)
def test_packed_is_padded_with_or_without_what_is_not_finite(key):
    shape = padded().mask.shape
    for field, value in SPOILS:
        of = poisoned(field, value)
        (a, slopes), (b, packed_slopes) = program(key)(of, shape), program(key)(packed(of), shape)
        for name, x, y in [("value", a, b), *((f"slope in {n}", slopes[n], packed_slopes[n]) for n in FLOATS)]:
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5, err_msg=f"{name}, {value} in {field}")
        if not getattr(CALLED[key], "over_batch", False):
            others = np.arange(len(of.mask)) != BAD[0]
            assert np.isfinite(np.asarray(b)[others]).all()
            assert all(np.isfinite(np.asarray(x)[others]).all() for x in packed_slopes.values())


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "prompt-mean"])
@pytest.mark.parametrize("value", [0.0, np.nan, -np.inf])
def test_aggregation_of_packed_rows_is_that_of_padded_ones(mode, value):
    length = 16.0 if mode == "seq-mean-token-sum-norm" else None
    aggregation = rl_fn.components.Aggregation(mode, length)
    of = poisoned(None if value == 0.0 else "advantages", value)
    row = packed(of)
    one, other = aggregation(of.advantages, of.mask, None), aggregation(row.advantages, row.mask, row.segment_ids)
    np.testing.assert_allclose(other, one, rtol=1e-5)
