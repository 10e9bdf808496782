"""Branches that are known while tracing."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.bridge.functional.both import check


@pytest.mark.parametrize("which", [-5, 0, 1, 2, 9])
def test_a_known_branch(which):
    branches = [jnp.negative, jnp.square, jnp.exp]
    check(lambda x: lax.switch(which, branches, x), np.array([0.5, -2.0], np.float32))
