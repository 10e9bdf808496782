"""CORE-11: a batch without rows, or of groups without any, is an empty result of the right shapes, as JAX gives it."""

import jax
import numpy as np
import pytest
import torch

import rl_fn
from rl_bridge.functional import from_jax
from tests.bridge.functional.both import to_torch

# Of each argument whether it is floats or a mask.
RECURRENCES = {
    "linear_recurrence": ("ffm", {}),
    "discounted_returns": ("fm", {}),
    "gae": ("ffm", {}),
    "td_lambda": ("ffm", {}),
    "n_step": ("ffm", {"n": 2}),
    "vtrace": ("fffm", {}),
    "retrace": ("fffm", {}),
    "reinforce_pp_advantages": ("fm", {}),
    "clipped_importance_advantages": ("fffm", {}),
}


def arrays(kinds, shape):
    draw = np.random.default_rng(0)
    made = {"f": lambda: draw.normal(size=shape).astype(np.float32), "m": lambda: np.ones(shape, bool)}
    return [made[kind]() for kind in kinds]


@pytest.mark.parametrize("name", RECURRENCES)
def test_no_rows(name):
    kinds, options = RECURRENCES[name]
    function = getattr(rl_fn, name)
    converted = from_jax(lambda *xs: function(*xs, **options))
    # Also when the same function has served rows, and goes on serving them.
    for shape in ((0, 5), (2, 5), (0, 4), (2, 0, 5)):
        given = arrays(kinds, shape)
        found = converted(*map(to_torch, given))
        wanted = function(*given, **options)
        leaves = [found] if isinstance(found, torch.Tensor) else list(found)
        assert [tuple(x.shape) for x in leaves] == [tuple(x.shape) for x in jax.tree.leaves(wanted)]
