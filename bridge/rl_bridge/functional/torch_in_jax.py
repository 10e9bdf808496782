"""`to_jax`: a torch function (a Triton kernel, say) inside jax.jit.

The file stands alone since nothing of the other direction, `from_jax`, is needed here or needs what is here.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rl_bridge.functional.crossing import refuse_fork


def to_jax(torch_fn: Callable[..., Any], *, output_shapes: Any = None, depth: int = 1) -> Callable[..., Any]:
    """A JAX function, usable under jit and grad, that calls `torch_fn` on the same memory through `wrap_torch2jax`.

    Positional arguments are pytrees of arrays. `output_shapes`, a pytree of jax.ShapeDtypeStruct or a function of the
    arguments' ShapeDtypeStructs that returns one, is needed where `torch_fn` cannot run on torch's meta tensors (a
    Triton kernel cannot). `depth`: how often it can be differentiated. The first use on a machine compiles
    wrap_torch2jax's C++ extension, which takes minutes.
    """
    wrapped: dict[Any, Callable[..., Any]] = {}

    def call(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        structs = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
        key = (tree, tuple((s.shape, s.dtype) for s in structs))
        if key not in wrapped:
            refuse_fork("to_jax")
            # Imported here: it is an extra, and nothing else needs it.
            from wrap_torch2jax import torch2jax

            example = jax.tree.unflatten(tree, structs)
            shapes = output_shapes(*example) if callable(output_shapes) else output_shapes
            wrapped[key] = torch2jax(torch_fn, *example, output_shapes=shapes, depth=depth)
        return wrapped[key](*jax.tree.unflatten(tree, [jnp.asarray(x) for x in leaves]))

    return call
