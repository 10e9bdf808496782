"""`through_xla`: the JAX function itself, run by XLA on torch's memory. The oracle that from_jax is tested against."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from rl_bridge.functional import runtime
from rl_bridge.functional.call import as_torch_function, static_key, traced_arguments, with_static
from rl_bridge.functional.crossing import is_float, jax_dtype, refuse_fork, require_plain, torch_dtype, wide_types

_CALLS: dict[str, "_Call"] = {}
_KEYS: dict[Any, str] = {}


def through_xla(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A differentiable torch function that runs the JAX function `fn` under jax.jit, over DLPack.

    The gradient is jax.vjp's, and the forward runs again for it. Arguments and results are as for `from_jax`. Results
    are copies, and the call waits for XLA: an in-place write to an argument afterwards cannot reach the computation.
    Each combination of shapes is compiled by XLA. No second derivative.

    >>> import jax.numpy as jnp, torch
    >>> through_xla(jnp.cumsum)(torch.tensor([1.0, 2.0]))
    tensor([1., 3.])
    """
    return as_torch_function(fn, functools.partial(_run, fn))


def _run(fn: Callable[..., Any], leaves: Sequence[Any], tree: Any) -> Any:
    name = getattr(fn, "__name__", type(fn).__name__)
    arguments = traced_arguments(leaves, f"through_xla({name})")
    tensors = [leaves[a.position] for a in arguments]
    if not tensors:
        raise TypeError(f"through_xla({name}) was called without a torch tensor: call the JAX function itself")
    key = (fn, tree, wide_types(), *map(static_key, leaves))
    if key not in _KEYS:
        _KEYS[key] = f"{name}:{len(_KEYS)}"
        _CALLS[_KEYS[key]] = _Call(fn, leaves, tree, arguments)
    if not runtime.tracing():
        refuse_fork("through_xla")
        tensors = [require_plain(x, f"through_xla({name})") for x in tensors]
    results = _forward(_KEYS[key], tensors)
    return _CALLS[_KEYS[key]].rebuild(results)


class _Call:
    """A function with its static arguments bound: flat arrays in, flat arrays out."""

    def __init__(self, fn: Callable[..., Any], leaves: Sequence[Any], tree: Any, arguments: Sequence[Any]):
        self._fn, self._tree, self._arguments = fn, tree, arguments
        self._leaves = [None if isinstance(x, Tensor) else x for x in leaves]  # keeps no tensor alive
        self.active = [i for i, a in enumerate(arguments) if is_float(a.dtype)]
        self.forward = jax.jit(self._flat)
        self.backward = jax.jit(self._pull_back)

    def _flat(self, *arrays: Any) -> list[Any]:
        filled = list(self._leaves)
        for argument, array in zip(self._arguments, arrays, strict=True):
            filled[argument.position] = array
        args, kwargs = jax.tree.unflatten(self._tree, filled)
        leaves, self._out = jax.tree.flatten(self._fn(*args, **kwargs))
        self._static = {
            i: x for i, x in enumerate(leaves) if not hasattr(x, "dtype") and not isinstance(x, int | float)
        }
        return [jnp.asarray(x) for i, x in enumerate(leaves) if i not in self._static]

    def _pull_back(self, arrays: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def floating(*active: Any) -> list[Any]:
            filled = list(arrays)
            for i, array in zip(self.active, active, strict=True):
                filled[i] = array
            return [x for x in self._flat(*filled) if is_float(x.dtype)]

        return jax.vjp(floating, *(arrays[i] for i in self.active))[1](list(cotangents))

    def results(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Shapes and dtypes of the results."""
        shapes = [[int(size) for size in x.shape] for x in tensors]
        pairs = zip(shapes, self._arguments, strict=True)
        return jax.eval_shape(self._flat, *(jax.ShapeDtypeStruct(shape, a.dtype) for shape, a in pairs))

    def to_jax(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [
            to_array(runtime.narrow(x, i) if jax_dtype(x.dtype) != a.dtype else x)
            for i, (x, a) in enumerate(zip(tensors, self._arguments, strict=True))
        ]

    def rebuild(self, results: Sequence[Tensor]) -> Any:
        return jax.tree.unflatten(self._out, with_static(results, self._static))


def to_array(x: Tensor) -> jax.Array:
    """The tensor's memory as a JAX array."""
    if x.numel() == 0:  # nothing to share, and strides that DLPack consumers disagree on
        return jnp.zeros(tuple(x.shape), jax_dtype(x.dtype))
    return jax.dlpack.from_dlpack(x.detach().contiguous())


def to_tensor(x: jax.Array, device: torch.device) -> Tensor:
    """A copy: the memory of a JAX array may be an argument's or a constant's, and torch may write to it."""
    if x.size == 0:
        return torch.empty(x.shape, dtype=torch_dtype(x.dtype), device=device)
    return torch.from_dlpack(x).clone()


# As registered operators both are opaque to Dynamo and to AOTAutograd: a plain autograd.Function over DLPack would be
# traced into, with fake tensors.
@torch.library.custom_op("rl_bridge::through_xla", mutates_args=())
def _forward(key: str, tensors: list[Tensor]) -> list[Tensor]:
    call = _CALLS[key]
    results = jax.block_until_ready(call.forward(*call.to_jax(tensors)))
    return [to_tensor(x, tensors[0].device) for x in results]


@_forward.register_fake
def _(key: str, tensors: list[Tensor]) -> list[Tensor]:
    structs = _CALLS[key].results(tensors)
    return [torch.empty(x.shape, dtype=torch_dtype(x.dtype), device=tensors[0].device) for x in structs]


@torch.library.custom_op("rl_bridge::through_xla_backward", mutates_args=())
def _backward(key: str, tensors: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    call = _CALLS[key]
    gradients = jax.block_until_ready(call.backward(call.to_jax(tensors), [to_array(x) for x in cotangents]))
    return [to_tensor(x, tensors[0].device) for x in gradients]


@_backward.register_fake
def _(key: str, tensors: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    return [torch.empty(tensors[i].shape, dtype=tensors[i].dtype, device=tensors[i].device) for i in _CALLS[key].active]


def _save(ctx: Any, inputs: tuple[str, list[Tensor]], output: list[Tensor]) -> None:
    ctx.key, tensors = inputs
    ctx.floats = [(i, x.shape, x.dtype, x.device) for i, x in enumerate(output) if x.is_floating_point()]
    ctx.save_for_backward(*tensors)


def _pull_back(ctx: Any, gradients: list[Tensor | None]) -> tuple[None, list[Tensor | None]]:
    cotangents = []
    for i, shape, dtype, device in ctx.floats:
        cotangent = gradients[i]
        cotangents.append(torch.zeros(shape, dtype=dtype, device=device) if cotangent is None else cotangent)
    tensors = list(ctx.saved_tensors)
    result: list[Tensor | None] = [None] * len(tensors)
    if cotangents:
        for i, gradient in zip(_CALLS[ctx.key].active, _backward(ctx.key, tensors, cotangents), strict=True):
            result[i] = gradient
    return None, result


_forward.register_autograd(_pull_back, setup_context=_save)
