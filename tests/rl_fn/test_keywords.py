"""Every option of every public function is set by a case, and changes the result: none is free of the laws.

Generated over the signatures: keyword arguments, and positional ones that have a default.
"""

import functools
import inspect

import jax
import numpy as np
import pytest

from tests.rl_fn.laws import is_array
from tests.rl_fn.registry import CASES

SEEDS = range(6)
NAMES = sorted({case.name for case in CASES.values()})
OF_FUNCTION = {name: [key for key, case in CASES.items() if case.name == name] for name in NAMES}


@functools.cache
def parameters(name):
    return inspect.signature(CASES[OF_FUNCTION[name][0]].function).parameters


def bound(key, seed):
    """The arguments of a case's call, by the name of their parameter."""
    case = CASES[key]
    args, kwargs = case.make(seed)
    if case.random:
        args = (jax.random.key(args[0]), *args[1:])
    return inspect.signature(case.function).bind(*args, **kwargs).arguments


def call(key, arguments):
    named = inspect.signature(CASES[key].function).parameters
    args = [x for name, x in arguments.items() if named[name].kind is not inspect.Parameter.KEYWORD_ONLY]
    kwargs = {name: x for name, x in arguments.items() if named[name].kind is inspect.Parameter.KEYWORD_ONLY}
    return [np.asarray(x) for x in jax.tree.leaves(CASES[key].function(*args, **kwargs))]


@functools.lru_cache(maxsize=64)
def result(key, seed):
    return call(key, bound(key, seed))


def differ(a, b):
    return len(a) != len(b) or any(not np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def same(a, b):
    return a is b or (np.shape(a) == np.shape(b) and bool(np.all(np.asarray(a == b))))


def others(key, name):
    """Other values of a parameter: its default, and what the function's other cases give it."""
    default = parameters(CASES[key].name)[name].default
    values = [] if default is inspect.Parameter.empty else [default]
    found = [bound(other, 0) for other in OF_FUNCTION[CASES[key].name] if other != key]
    return values + [arguments[name] for arguments in found if name in arguments and not is_array(arguments[name])]


def changes(key, name, seed):
    """Whether the case sets the parameter, and the result is another one with another value."""
    given = bound(key, seed)
    for value in others(key, name) if name in given else []:
        if same(given[name], value):
            continue
        try:
            if differ(result(key, seed), call(key, {**given, name: value})):
                return True
        except ValueError:
            continue  # an option that goes with another one, as a mode's length
    return False


# The scale has the shape that belongs to the block, so that another block is refused; the oracle checks the values.
BY_SHAPE = {("dequantize", "block")}


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (function, name)
        for function in OF_FUNCTION
        for name, p in parameters(function).items()
        if (p.kind is p.KEYWORD_ONLY or p.default is not p.empty) and (function, name) not in BY_SHAPE
    ],
)
def test_an_option_is_set_by_a_case_and_changes_the_result(function, name):
    assert any(changes(key, name, seed) for key in OF_FUNCTION[function] for seed in SEEDS)
