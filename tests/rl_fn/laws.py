"""What the laws share: one compiled program a case, its values and gradients, and junk for masked positions."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rl_fn
from tests.rl_fn.registry import CASES

# Compiling is most of the suite's time; one law (jit and eager agree) looks at optimised code. XLA's older emitters
# take a third of the time of its fusion emitters.
QUICK: dict[str, bool | int | str] = {"xla_backend_optimization_level": 0}


def _known(option: dict[str, bool | int | str]) -> dict[str, bool | int | str]:
    """Return the option, or nothing in a version of XLA without it."""
    try:
        jax.jit(jnp.negative, compiler_options=option)(1.0)
    except jax.errors.JaxRuntimeError:
        return {}
    return option


quick_jit = functools.partial(jax.jit, compiler_options=QUICK | _known({"xla_cpu_use_fusion_emitters": False}))

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
def _compiled(key: str) -> Callable[..., Any]:
    """Value and gradient in one program: the laws call it with other numbers, and compile it once."""
    case, call = CASES[key], function_of_arrays(key)

    def both(scale: jax.Array, *arrays: Any) -> Any:
        def floats_of(*active: Any) -> Any:
            filled = list(arrays)
            for position, x in zip(case.differentiable, active, strict=True):
                filled[position] = x
            leaves = jax.tree.leaves(call(*filled))
            return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)], leaves

        if not case.differentiable:
            return floats_of()[1], ()
        floats, pull, leaves = jax.vjp(floats_of, *(arrays[i] for i in case.differentiable), has_aux=True)
        return leaves, pull([scale.astype(x.dtype) * weights(x) for x in floats])

    return quick_jit(both)


def weights(x: jax.Array) -> jax.Array:
    """Uneven, so that a gradient that is wrong but sums to the right number is seen."""
    return jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)


def evaluate(key: str, arrays: list[Any], scale: float = 1.0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Leaves of the result, and the gradient of their sum, weighted by `scale` and by `weights`."""
    leaves, gradients = _compiled(key)(np.float32(scale), *arrays)
    return [np.asarray(x) for x in leaves], [np.asarray(g) for g in gradients]


def both(key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Evaluate a call's value and gradient."""
    return evaluate(key, split(args, kwargs)[0])


def run(key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[np.ndarray]:
    """Leaves of the result."""
    return both(key, args, kwargs)[0]


def with_junk(
    key: str, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with NaN, ±inf and huge numbers at every masked position, of a masked row in all its entries."""
    case = CASES[key]
    assert case.mask is not None
    mask = args[case.mask]
    rng = np.random.default_rng(seed)

    def spoiled(x: np.ndarray) -> np.ndarray:
        junk = rng.choice(np.array(JUNK, np.float32), size=x.shape)
        return np.where(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x, junk)

    spoiled_args = tuple(spoiled(x) if under_mask(x, mask) and i in case.masked else x for i, x in enumerate(args))
    return spoiled_args, {k: spoiled(x) if under_mask(x, mask) else x for k, x in kwargs.items()}


def under_mask(x: Any, mask: np.ndarray) -> bool:
    """Whether x has a float, or a row of floats, at each position of the mask."""
    return isinstance(x, np.ndarray) and x.dtype == np.float32 and x.shape[: mask.ndim] == mask.shape


def close(a: list[np.ndarray], b: list[Any], *, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=rtol, atol=atol)


MASKED = sorted(key for key, case in CASES.items() if case.mask is not None)
DIFFERENTIABLE = sorted(key for key, case in CASES.items() if case.differentiable)
DETERMINISTIC = sorted(key for key, case in CASES.items() if not case.random)
