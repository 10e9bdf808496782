"""What the laws share: one compiled program a case, its values and gradients, and junk for masked positions."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import rl_fn
from tests.rl_fn.registry import CASES

Options = dict[str, bool | int | str]


def _known(options: Options) -> Options:
    """Return those of the options that this version of XLA has."""
    known: Options = {}
    for name, value in options.items():
        try:
            jax.jit(jnp.negative, compiler_options={name: value})(1.0)
        except jax.errors.JaxRuntimeError:
            continue
        known[name] = value
    return known


# Compiling is most of the suite's time, and code that is not optimised, by XLA's older emitters, in one piece, takes a
# ninth of it. One law (jit and eager agree) looks at what users get, whatever conftest.py has asked of XLA.
QUICK = _known(
    {
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
    }
)
OPTIMISED = _known({"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True})
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)
optimising_jit = functools.partial(jax.jit, compiler_options=OPTIMISED)

# As many seeds as the fast profile has examples: all laws of a case meet the same, and share what `clean` computes.
EXAMPLES = hypothesis.settings().max_examples
SEEDS = st.integers(0, EXAMPLES - 1 if hypothesis.settings().derandomize else 2**32 - 1)


def every_seed(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test for every seed, or for seeds that Hypothesis draws where a profile is not derandomised.

    With all seeds there is nothing to draw, and Hypothesis takes longer for an example than most laws do.
    """
    if not hypothesis.settings().derandomize:
        return hypothesis.given(seed=SEEDS)(test)

    def run_all(**parameters: Any) -> None:
        for seed in range(EXAMPLES):
            try:
                test(**parameters, seed=seed)
            except BaseException as error:
                error.add_note(f"seed={seed}")
                raise

    signature = inspect.signature(test)
    left = [p for name, p in signature.parameters.items() if name != "seed"]
    functools.update_wrapper(run_all, test)
    run_all.__signature__ = signature.replace(parameters=left)  # pyright: ignore[reportFunctionMemberAccess]
    return run_all


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


def value_and_gradient(key: str) -> Callable[..., Any]:
    """The function that gives a case's result and its gradient, from the number that the gradient is times."""
    case, call = CASES[key], function_of_arrays(key)

    def both(scale: jax.Array, *arrays: Any) -> Any:
        def floats_of(*active: Any) -> Any:
            filled = list(arrays)
            for position, x in zip(case.differentiable, active, strict=True):
                filled[position] = x
            result = call(*filled)
            return [x for x in jax.tree.leaves(result) if jnp.issubdtype(x.dtype, jnp.floating)], result

        if not case.differentiable:
            return floats_of()[1], ()
        floats, pull, result = jax.vjp(floats_of, *(arrays[i] for i in case.differentiable), has_aux=True)
        return result, pull([scale.astype(x.dtype) * weights(x) for x in floats])

    return both


@functools.lru_cache(maxsize=32)  # the laws of a case are neighbours (conftest.py)
def _compiled(key: str) -> Callable[..., Any]:
    """Value and gradient in one program: the laws call it with other numbers, and compile it once."""
    return quick_jit(value_and_gradient(key))


@functools.lru_cache(maxsize=32)
def values(key: str) -> Callable[..., Any]:
    """The function of arrays alone, for laws whose shapes no gradient is asked of."""
    return quick_jit(function_of_arrays(key))


def weighted(leaves: list[Any]) -> jax.Array:
    """The weighted sum of the floating leaves; what a transform has cut off, −inf, stays so and is left out."""
    floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((jnp.vdot(weights(x), jnp.where(jnp.isinf(x), 0.0, x)) for x in floats if x.size), jnp.zeros(()))


def widened(arrays: list[Any]) -> list[Any]:
    """Float32 as float64, for a program under x64."""
    return [x.astype(np.float64) if x.dtype == np.float32 else x for x in map(np.asarray, arrays)]


@functools.lru_cache(maxsize=8)  # for gradients and for curvatures (conftest.py brings a case's tests together)
def wide_program(key: str) -> Callable[..., Any]:
    """In float64, of the arrays moved by step · direction: weighted result, its gradient, and its slope along it."""
    case, call = CASES[key], function_of_arrays(key)

    def scalar(arrays: list[Any], active: list[Any]) -> tuple[jax.Array, jax.Array]:
        filled = list(arrays)
        for i, x in zip(case.differentiable, active, strict=True):
            filled[i] = x
        leaves = [x for x in jax.tree.leaves(call(*filled)) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert all(leaf.dtype == jnp.float64 for leaf in leaves)
        total = weighted(leaves)
        return total, total

    def program(arrays: list[Any], direction: list[Any], step: float) -> Any:
        active = [arrays[i] + step * v for i, v in zip(case.differentiable, direction, strict=True)]
        gradient = jax.grad(functools.partial(scalar, arrays), has_aux=True)
        slope, curvature, value = jax.jvp(gradient, (active,), (direction,), has_aux=True)
        return value, slope, curvature

    return quick_jit(program)


def surrogate(key: str, moving: list[Any], held: list[Any]) -> np.ndarray:
    """The case's surrogate, of its arrays and of the same arrays held fixed, with the case's static arguments."""
    case = CASES[key]
    assert case.surrogate is not None
    _, join = split(*case.make(0))
    (moving_args, _), (held_args, kwargs) = join(*moving), join(*held)
    return case.surrogate(moving_args, held_args, **kwargs)


def weights(x: jax.Array) -> jax.Array:
    """Uneven, so that a gradient that is wrong but sums to the right number is seen."""
    return jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)


def result_and_gradient(key: str, arrays: list[Any], scale: float = 1.0) -> tuple[Any, tuple[jax.Array, ...]]:
    """The result as it is returned, and the gradient of its leaves' sum, weighted by `scale` and by `weights`."""
    return _compiled(key)(np.float32(scale), *arrays)


def evaluate(key: str, arrays: list[Any], scale: float = 1.0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Leaves of the result, and its gradient."""
    result, gradients = result_and_gradient(key, arrays, scale)
    return [np.asarray(x) for x in jax.tree.leaves(result)], [np.asarray(g) for g in gradients]


def both(key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Evaluate a call's value and gradient."""
    return evaluate(key, split(args, kwargs)[0])


def run(key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[np.ndarray]:
    """Leaves of the result."""
    return both(key, args, kwargs)[0]


@functools.lru_cache(maxsize=2 * EXAMPLES)
def clean(key: str, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Value and gradient of the case as it is drawn: what several laws compare with."""
    return both(key, *CASES[key].make(seed))


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
