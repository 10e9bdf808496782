"""A total and what it is divided by, where there is nothing to divide by."""

import jax
import jax.numpy as jnp

from rl_fn.aggregation import Ratio


def test_a_ratio_without_a_denominator_is_its_total():
    for denominator, value, slope in ((0.0, 3.0, 1.0), (1.0, 3.0, 1.0), (2.0, 1.5, 0.5)):
        ratio = Ratio(jnp.array(3.0), jnp.array(denominator))
        assert ratio.value() == value
        assert jax.grad(lambda t, r=ratio: Ratio(t, r.denominator).value())(ratio.total) == slope
        assert jnp.isfinite(jax.grad(lambda d, r=ratio: Ratio(r.total, d).value())(ratio.denominator))
