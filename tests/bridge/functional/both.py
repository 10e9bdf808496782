"""What the interop tests share: the same NumPy arguments through JAX and through from_jax, values and gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from rl_bridge.functional import from_jax

ANY, POSITIVE, UNIT = "any", "positive", "unit"


def draw(seed: int, shape: tuple[int, ...], domain: str = ANY) -> np.ndarray:
    """Multiples of a quarter: ties and zeros are frequent."""
    x = np.round(np.random.default_rng(seed).normal(0.0, 1.0, shape) * 4) / 4
    x = {ANY: x, POSITIVE: np.abs(x) + 0.25, UNIT: np.clip(x, -3.0, 3.0) / 4}[domain]
    return np.asarray(x, np.float32)


def to_torch(x: Any) -> Any:
    return torch.from_numpy(np.array(x)) if isinstance(x, np.ndarray | np.generic) else x


def to_numpy(x: Any) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        x = x.detach()
        return (x.double() if x.is_floating_point() else x).numpy()
    array = np.asarray(x)
    return array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array


def weights(leaf: Any) -> np.ndarray:
    """Uneven, so that a gradient that is wrong but sums to the right number is seen."""
    size = int(np.prod(leaf.shape))
    return np.cos(np.arange(size)).reshape(tuple(leaf.shape)).astype(np.float32)


def jax_gradient(fn: Callable[..., Any], args: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    def scalar(*active: Any) -> Any:
        filled = list(args)
        for place, value in zip(places, active, strict=True):
            filled[place] = value
        leaves = [x for x in jax.tree.leaves(fn(*filled)) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum((jnp.sum(weights(x) * x.astype(jnp.float32)) for x in leaves), start=jnp.float32(0.0))

    if not places:
        return ()
    return jax.grad(scalar, argnums=tuple(range(len(places))))(*(jnp.asarray(args[i]) for i in places))


def torch_gradient(fn: Callable[..., Any], args: Sequence[Any], places: Sequence[int]) -> list[torch.Tensor]:
    tensors = [to_torch(x) for x in args]
    for i in places:
        tensors[i] = tensors[i].detach().requires_grad_()
    leaves = [x for x in jax.tree.leaves(fn(*tensors)) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    total = sum(((torch.from_numpy(weights(x)) * x.float()).sum() for x in leaves), start=torch.zeros(()))
    active = [tensors[i] for i in places]
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in active]
    found = torch.autograd.grad(total, active, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(active, found, strict=True)]


def assert_same(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Equal trees, shapes and dtypes; values up to rounding."""
    a, tree_a = jax.tree.flatten(actual)
    b, tree_b = jax.tree.flatten(expected)
    assert tree_a == tree_b
    for x, y in zip(a, b, strict=True):
        assert tuple(x.shape) == tuple(np.shape(y))
        assert str(x.dtype).removeprefix("torch.") == str(jnp.result_type(y))
        np.testing.assert_allclose(to_numpy(x), to_numpy(y), rtol=rtol, atol=atol)


def check(
    fn: Callable[..., Any],
    *args: Any,
    places: Sequence[int] | None = None,
    lowered: Callable[..., Any] | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """from_jax(fn) gives fn's values and gradients. `places`: arguments with a gradient."""
    lowered = lowered or from_jax(fn)
    arrays = [jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x for x in args]
    assert_same(lowered(*map(to_torch, args)), fn(*arrays), rtol, atol)
    if places is None:
        places = [i for i, x in enumerate(args) if isinstance(x, np.ndarray) and x.dtype.kind == "f"]
    if places:
        expected = jax_gradient(fn, arrays, places)
        for actual, wanted in zip(torch_gradient(lowered, args, places), expected, strict=True):
            np.testing.assert_allclose(to_numpy(actual), to_numpy(wanted), rtol=10 * rtol, atol=10 * atol)


class Family:
    """Many small functions. JAX compiles all of them, with their gradients, as one program a shape: that is quick."""

    def __init__(
        self,
        functions: dict[str, Callable[..., Any]],
        draw: Callable[[str, tuple[int, ...], int], Sequence[np.ndarray]],
    ):
        self.functions, self._draw = functions, draw
        self._lowered = {name: from_jax(function) for name, function in functions.items()}
        # Optimised code is not what is tested, and takes longer to compile.
        self._jitted = jax.jit(self._all, compiler_options={"xla_backend_optimization_level": 0})
        self._expected = functools.lru_cache(maxsize=64)(self._compute)

    def _all(self, arguments: dict[str, Sequence[Any]]) -> dict[str, Any]:
        return {
            name: (function(*arguments[name]), jax_gradient(function, arguments[name], floating(arguments[name])))
            for name, function in self.functions.items()
        }

    def _compute(self, shape: tuple[int, ...], seed: int) -> dict[str, Any]:
        return self._jitted({name: tuple(self._draw(name, shape, seed)) for name in self.functions})

    def check(self, name: str, shape: tuple[int, ...], seed: int, rtol: float = 3e-5, atol: float = 5e-6) -> None:
        value, gradient = self._expected(shape, seed)[name]
        args = self._draw(name, shape, seed)
        lowered = self._lowered[name]
        assert_same(lowered(*map(to_torch, args)), value, rtol, atol)
        for actual, wanted in zip(torch_gradient(lowered, args, floating(args)), gradient, strict=True):
            np.testing.assert_allclose(to_numpy(actual), to_numpy(wanted), rtol=10 * rtol, atol=10 * atol)


def floating(args: Sequence[Any]) -> list[int]:
    return [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]
