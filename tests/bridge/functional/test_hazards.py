"""What may not cross between JAX and torch is refused by name; what may crosses unharmed."""

import dataclasses
import multiprocessing
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rl_bridge.functional import from_jax, through_xla

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]])
INTEROP = pytest.mark.parametrize("interop", [from_jax, through_xla])


class Pair(NamedTuple):
    values: object
    mask: object


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: float


def test_through_xla_refuses_fake_and_meta_tensors():
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
    with pytest.raises(TypeError, match="FakeTensor"):
        through_xla(jnp.sin)(torch.empty(2, device="meta"))
    with pytest.raises((TypeError, AssertionError), match=r"FakeTensor|[Ff]ake"):
        through_xla(jnp.sin)(fake)


def test_through_xla_refuses_subclasses_and_sparse_tensors():
    class Tagged(torch.Tensor):
        pass

    with pytest.raises(TypeError, match="Tagged"):
        through_xla(jnp.sin)(X.as_subclass(Tagged))
    with pytest.raises(TypeError, match="to_dense"):
        through_xla(jnp.sin)(X.to_sparse())


def test_dtensor_is_refused_over_dlpack_and_whole_through_from_jax():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(X, init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(TypeError, match=r"through_xla\(sin\): a DTensor.*full_tensor\(\) or x.to_local\(\)"):
            through_xla(jnp.sin)(sharded)
        result = from_jax(lambda x: jnp.sum(jnp.sin(x), axis=-1))(sharded)
        assert isinstance(result, DTensor)
        torch.testing.assert_close(result.full_tensor(), X.sin().sum(-1))
    finally:
        torch.distributed.destroy_process_group()


@INTEROP
def test_float64_is_refused_and_int64_narrowed_if_it_fits(interop):
    with pytest.raises(TypeError, match=r"float64 would be narrowed.*jax_enable_x64"):
        interop(jnp.sin)(X.double())
    assert interop(lambda i: i + 1)(torch.tensor([2, 3])).dtype == torch.int32
    with pytest.raises(ValueError, match="beyond int32"):
        interop(lambda i: i + 1)(torch.tensor([2**40]))


@INTEROP
def test_a_write_after_the_call_does_not_reach_it(interop):
    x = X.clone()
    result = interop(lambda x: (x, x * 2.0, x.T))(x)
    x.zero_()
    for actual, expected in zip(result, (X, X * 2.0, X.T), strict=True):
        torch.testing.assert_close(actual, expected)
    result[0].fill_(9.0)
    assert not x.any()


@INTEROP
@pytest.mark.parametrize(
    "x", [X.T, X[:, ::2], X[0, 0].expand(2, 3), X.flip(0)[1:], torch.as_strided(X, (2, 2), (0, 1)), X[:0]]
)
def test_any_strides(interop, x):
    torch.testing.assert_close(interop(lambda x: x * 2.0 + 1.0)(x), x * 2.0 + 1.0)


@INTEROP
def test_leaf_and_intermediate_gradients(interop):
    leaf = X.clone().requires_grad_()
    inner = leaf * 3.0
    inner.retain_grad()
    interop(lambda x: jnp.sum(x * x))(inner).backward()
    torch.testing.assert_close(inner.grad, 6.0 * X)
    torch.testing.assert_close(leaf.grad, 18.0 * X)


@INTEROP
def test_no_grad_and_inference_mode(interop):
    double = interop(lambda x: x * 2.0 + jnp.arange(3.0)[None])
    x = X.clone().requires_grad_()
    with torch.no_grad():
        assert not double(x).requires_grad
    with torch.inference_mode():
        assert double(x).is_inference()
    assert double(x).requires_grad  # nothing that inference mode cached is left


def test_second_derivatives():
    x = torch.tensor([0.5, 2.0], requires_grad=True)
    (first,) = torch.autograd.grad(from_jax(lambda x: jnp.sum(x**3))(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6.0 * x.detach())


def test_functional_transforms():
    square = from_jax(lambda x: jnp.sum(jnp.abs(x) * x))
    torch.testing.assert_close(torch.func.grad(square)(X), 2.0 * X.abs())
    torch.testing.assert_close(torch.func.vmap(from_jax(lambda x: x - jnp.max(x)))(X), X - X.amax(1, keepdim=True))


@INTEROP
def test_trees_none_and_static_arguments(interop):
    def fn(pair, names, *, settings, mode):
        assert pair.mask is None and mode == "up"
        return {"scaled": pair.values * settings.scale, "rest": (names["a"] + 1.0, None, mode)}

    result = interop(fn)(Pair(X, None), {"a": X[0]}, settings=Settings(2.0), mode="up")
    torch.testing.assert_close(result["scaled"], 2.0 * X)
    assert result["rest"][1] is None and result["rest"][2] == "up"
    assert torch.equal(interop(fn)(Pair(X, None), {"a": X[0]}, settings=Settings(3.0), mode="up")["scaled"], 3.0 * X)


@INTEROP
def test_numpy_arrays_and_numbers_are_constants(interop):
    fn = interop(lambda x, array, number: x * array + number)
    torch.testing.assert_close(fn(X, np.float32([1, 2, 3])[None], 0.5), X * torch.tensor([1.0, 2.0, 3.0]) + 0.5)
    torch.testing.assert_close(fn(X, np.float32([3, 2, 1])[None], 1.5), X * torch.tensor([3.0, 2.0, 1.0]) + 1.5)
    with pytest.raises(TypeError, match="without a torch tensor"):
        fn(np.ones(3, np.float32), np.ones(3, np.float32), 1.0)


def test_unhashable_static_argument():
    with pytest.raises(TypeError, match="hashable, got set"):
        from_jax(lambda x, s: x)(X, {1, 2})


def test_a_primitive_without_a_rule_is_named_with_its_function():
    def tail(x):
        return jax.lax.igamma(x, x)

    def noise(key, x):
        return x + jax.random.normal(jax.random.wrap_key_data(key), x.shape)

    with pytest.raises(NotImplementedError, match=r"from_jax\(tail\).*'igamma'.*test_hazards"):
        from_jax(tail)(X)
    with pytest.raises(NotImplementedError, match=r"from_jax.*(random|key<fry>)"):
        from_jax(noise)(torch.tensor([0, 1]).to(torch.uint32), X)


def test_custom_derivatives_and_stop_gradient():
    @jax.custom_vjp
    def clipped(x):
        return x * 2.0

    clipped.defvjp(lambda x: (x * 2.0, None), lambda _, g: (jnp.clip(g, -1.0, 1.0),))

    @jax.custom_jvp
    def odd(x):
        return x

    odd.defjvp(lambda primals, tangents: (primals[0], 5.0 * tangents[0]))
    x = X.clone().requires_grad_()
    outer = jax.jit(lambda x: jnp.sum(7.0 * clipped(x) + odd(x) + x * jax.lax.stop_gradient(x)))
    from_jax(outer)(x).backward()
    torch.testing.assert_close(x.grad, 1.0 + 5.0 + X)


def test_meta_tensors_trace_through_from_jax():
    result = from_jax(lambda x: jnp.cumsum(x, -1))(torch.empty(2, 3, device="meta"))
    assert result.device.type == "meta" and result.shape == (2, 3)


def _in_a_fork(queue):
    try:
        from_jax(jnp.sin)(X)
    except RuntimeError as error:
        queue.put(str(error))
    else:
        queue.put("no error")


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told_to_spawn():
    jnp.zeros(1).block_until_ready()  # JAX has started
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=_in_a_fork, args=(queue,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert "spawn" in queue.get()


def test_while_loop_has_a_value_but_no_gradient():
    doubled = from_jax(lambda x: jax.lax.while_loop(lambda v: jnp.sum(v) < 100.0, lambda v: v * 2.0, x))
    x = torch.ones(3)
    torch.testing.assert_close(doubled(x), torch.full((3,), 64.0))
    with pytest.raises(NotImplementedError, match="while_loop"):
        doubled(x.requires_grad_())


def test_second_derivative_of_a_custom_rule_is_refused():
    x = torch.tensor([0.5, 2.0], requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True through"):
        torch.autograd.grad(from_jax(jax.nn.softplus)(x).sum(), x, create_graph=True)
