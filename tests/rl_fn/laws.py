"""What the laws share: one compiled function a case, its leaves, its gradient, and junk for masked positions."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rl_fn
from tests.rl_fn.registry import CASES

# Compiling is most of the suite's time; one law (jit and eager agree) looks at optimised code.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

JUNK = (np.nan, np.inf, -np.inf, 1e30)


def is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic | jax.Array | rl_fn.RowState)


def split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Callable[..., Any]]:
    """The arrays of a call, and a function that puts other arrays in their places."""
    places: list[Any] = [i for i, x in enumerate(args) if is_array(x)] + [k for k, x in kwargs.items() if is_array(x)]
    arrays = [args[p] if isinstance(p, int) else kwargs[p] for p in places]

    def join(*values: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        chosen = dict(zip(places, values, strict=True))
        new_kwargs = {k: chosen.get(k, v) for k, v in kwargs.items()}
        return tuple(chosen.get(i, x) for i, x in enumerate(args)), new_kwargs

    return arrays, join


def function_of_arrays(key: str) -> Callable[..., Any]:
    """The case's function with its static arguments bound; takes the arrays alone."""
    _, join = split(*CASES[key].make(0))

    def call(*arrays: Any) -> Any:
        args, kwargs = join(*arrays)
        return CASES[key].function(*args, **kwargs)

    return call


@functools.cache
def compiled(key: str) -> Callable[..., Any]:
    return quick_jit(function_of_arrays(key))


def run(key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[np.ndarray]:
    """Leaves of the result."""
    arrays, _ = split(args, kwargs)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(compiled(key)(*arrays))]


@functools.cache
def _compiled_gradient(key: str) -> Callable[..., Any]:
    case, call = CASES[key], function_of_arrays(key)

    def scalar(*arrays: Any) -> jax.Array:
        leaves = [leaf for leaf in jax.tree.leaves(call(*arrays)) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        # Uneven weights, so that a gradient that is wrong but sums to the right number is seen.
        return sum(
            (jnp.sum(jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape) * leaf) for leaf in leaves),
            start=jnp.zeros((), leaves[0].dtype),
        )

    return quick_jit(jax.grad(scalar, argnums=case.differentiable))


def gradient(key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[np.ndarray]:
    """Gradient of a weighted sum of all outputs in each differentiable argument."""
    arrays, _ = split(args, kwargs)
    return [np.asarray(g) for g in _compiled_gradient(key)(*arrays)]


def with_junk(key: str, args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """The arguments with NaN, ±inf and huge numbers at every masked position."""
    case = CASES[key]
    assert case.mask is not None
    mask = args[case.mask]
    junk = np.random.default_rng(seed).choice(np.array(JUNK, np.float32), size=mask.shape)
    return tuple(
        np.where(mask, x, junk) if i in case.masked and np.shape(x) == mask.shape else x for i, x in enumerate(args)
    )


def close(a: list[np.ndarray], b: list[Any], *, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=rtol, atol=atol)


MASKED = sorted(key for key, case in CASES.items() if case.mask is not None)
DIFFERENTIABLE = sorted(key for key, case in CASES.items() if case.differentiable)
DETERMINISTIC = sorted(key for key, case in CASES.items() if not case.random)
