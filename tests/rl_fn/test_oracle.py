"""rl_fn in float32 equals the loops of tests/oracle in float64."""

import inspect

import jax
import pytest

import rl_fn
from tests.oracle.lookup import ORACLE
from tests.rl_fn.laws import DETERMINISTIC, clean, close, every_seed
from tests.rl_fn.registry import CASES, CONSTRUCTORS, HOST, RECIPES


def test_every_function_has_an_oracle():
    public = {name for name in rl_fn.__all__ if inspect.isfunction(getattr(rl_fn, name))}
    outside = {*RECIPES, *CONSTRUCTORS, *HOST, "sample"}
    assert public - outside == set(ORACLE) & public - outside


@pytest.mark.parametrize("key", DETERMINISTIC)
@every_seed
def test_equals_the_oracle(key, seed):
    args, kwargs = CASES[key].make(seed)
    expected = ORACLE[CASES[key].name](*args, **kwargs)
    close(clean(key, seed)[0], jax.tree.leaves(expected), rtol=5e-5, atol=1e-5)
