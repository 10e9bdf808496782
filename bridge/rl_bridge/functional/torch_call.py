"""A function of tensors inside a function of arrays: ``from_jax`` calls it where JAX's trace names it.

The file stands alone since rules are of JAX's primitives, and this primitive is ours.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import jax.extend.core as jex_core
import torch
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

from rl_bridge.functional.emitter import Builder, Value, rule

_TORCH_CALL = jex_core.Primitive("torch_call")


def torch_call(function: Callable[..., torch.Tensor], *arrays: Any) -> Any:
    """``function`` of the arrays, of which each is a tensor when it is called: of the first one's shape and dtype.

    JAX alone cannot run what it returns; ``from_jax`` of the function around it can, and its gradients are torch's.

    >>> import jax.numpy as jnp, torch
    >>> from rl_bridge.functional import from_jax
    >>> total = from_jax(lambda x: jnp.sum(torch_call(torch.sin, 2 * x)))
    >>> x = torch.tensor([0.0], requires_grad=True)
    >>> torch.autograd.grad(total(x), x)
    (tensor([2.]),)
    """
    return _TORCH_CALL.bind(*arrays, function=function)


@_TORCH_CALL.def_abstract_eval
def _shape_and_dtype(first: Any, *_: Any, function: Any) -> ShapedArray:
    del function
    return ShapedArray(first.shape, first.dtype)


def _refuse(*_: Any, function: Any = None, **__: Any) -> NoReturn:
    name = "a PyTorch function" if function is None else f"{function!r} is a function of PyTorch"
    raise TypeError(f"{name}: JAX alone cannot run or differentiate it, from_jax(…) can, and an engine does")


_TORCH_CALL.def_impl(_refuse)
ad.primitive_jvps[_TORCH_CALL] = _refuse
batching.primitive_batchers[_TORCH_CALL] = _refuse
mlir.register_lowering(_TORCH_CALL, _refuse)


@rule("torch_call")
def _lowered(b: Builder, eqn: Any, *xs: Value) -> Value:
    name = b.bind("own", eqn.params["function"])
    # The user's function may return an argument as it is.
    return b.out(f"{name}({', '.join(map(b.full, xs))})", eqn, alias=True)
