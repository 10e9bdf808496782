"""`to_jax`: torch functions inside JAX's transformations give JAX's own numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from rl_bridge.functional import from_jax, to_jax

pytestmark = pytest.mark.slow  # the first use on a machine compiles C++ for two minutes

X = jnp.asarray([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]])
Y = jnp.asarray([[2.0, 1.0, -1.0], [3.0, 0.25, 5.0]])


def torch_loss(x, y):
    return torch.sum(torch.tanh(x) * y, dim=-1)


def jax_loss(x, y):
    return jnp.sum(jnp.tanh(x) * y, axis=-1)


def test_values_eager_and_jitted():
    loss = to_jax(torch_loss)
    np.testing.assert_allclose(loss(X, Y), jax_loss(X, Y), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(loss)(X, Y), jax_loss(X, Y), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrt", [0, 1])
def test_gradient_eager_and_jitted(wrt):
    loss = to_jax(torch_loss)
    expected = jax.grad(lambda x, y: jnp.sum(jax_loss(x, y) ** 2), wrt)(X, Y)
    gradient = jax.grad(lambda x, y: jnp.sum(loss(x, y) ** 2), wrt)
    np.testing.assert_allclose(gradient(X, Y), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(gradient)(X, Y), expected, rtol=1e-5, atol=1e-6)


def test_second_derivative_as_deep_as_asked():
    second = jax.grad(jax.grad(to_jax(torch.sin, depth=2)))
    np.testing.assert_allclose(second(0.7), -np.sin(0.7), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(jax.grad(to_jax(torch.sin, depth=1)))(0.7)


def test_vmap():
    np.testing.assert_allclose(jax.vmap(to_jax(torch_loss))(X, Y), jax_loss(X, Y), rtol=1e-5, atol=1e-6)
    shared = jax.vmap(to_jax(torch_loss), in_axes=(0, None))(X, Y[0])
    np.testing.assert_allclose(shared, jax.vmap(jax_loss, in_axes=(0, None))(X, Y[0]), rtol=1e-5, atol=1e-6)


def test_trees_of_arrays_and_several_shapes():
    swap = to_jax(lambda t: {"sum": t["a"] + t["b"], "turned": t["b"].T})
    for a, b in [(X, Y), (X[:1], Y[:1]), (X, Y)]:
        result = jax.jit(swap)({"a": a, "b": b})
        np.testing.assert_array_equal(result["sum"], a + b)
        np.testing.assert_array_equal(result["turned"], b.T)


def test_output_shapes_for_what_has_no_meta_kernel():
    def data_dependent(x):
        # As a Triton kernel: it needs memory to read, so meta tensors do not tell its result's shape.
        return torch.from_numpy(np.sort(x.detach().numpy(), axis=-1))

    for shapes in (jax.ShapeDtypeStruct(X.shape, X.dtype), lambda x: x):
        function = to_jax(data_dependent, output_shapes=shapes)
        np.testing.assert_array_equal(jax.jit(function)(X), jnp.sort(X, axis=-1))


def test_there_and_back():
    """JAX → torch → JAX is the function that it began as, gradient included."""
    again = to_jax(from_jax(jax_loss))
    np.testing.assert_allclose(again(X, Y), jax_loss(X, Y), rtol=1e-5, atol=1e-6)
    expected = jax.grad(lambda x: jnp.sum(jax_loss(x, Y)))(X)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(again(x, Y)))(X), expected, rtol=1e-5, atol=1e-6)
