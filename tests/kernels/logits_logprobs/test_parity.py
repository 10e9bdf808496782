"""Every backend gives rl_fn's numbers: values against float64, gradients against jax.vjp."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import rl_fn
from tests.kernels.operations import logits_logprobs
from tests.kernels.registry import backends

# Not an import statement: the function has the name of its folder.
torch_backend = importlib.import_module("rl_kernels.logits_logprobs.torch")
BACKENDS = backends("logits_logprobs")
OTHERS = [backend for backend in BACKENDS if backend != "torch"]
INF = float("inf")
ROWS, V = 13, 11


def exact(logits, tokens, temperature=1.0, softcap=None):
    """Log-probability, entropy and logsumexp in float64 NumPy, from the definition."""
    z = logits.double().numpy()
    x = z if softcap is None else np.where(z == -INF, -INF, softcap * np.tanh(z / softcap))
    x = x / (temperature if isinstance(temperature, float) else temperature.double().numpy()[..., None])
    top = x.max(-1, keepdims=True)
    lse = top[..., 0] + np.log(np.exp(x - top).sum(-1))
    p = np.exp(x - lse[..., None])
    entropy = -np.where(p > 0, p * np.where(p > 0, x - lse[..., None], 0.0), 0.0).sum(-1)
    return np.take_along_axis(x, tokens.numpy()[..., None], -1)[..., 0] - lse, entropy, lse


def normal(*shape, scale=3.0, seed=0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids(*shape, seed=0):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def truncated():
    """Half of each row is impossible, not the row's token."""
    tokens = ids(ROWS)
    cut = (torch.rand(ROWS, V, generator=torch.Generator().manual_seed(1)) < 0.5).scatter(1, tokens[:, None], False)
    return normal(ROWS, V).masked_fill(cut, -INF), tokens


def gaps():
    """Rows where the token is 90 above or below the rest."""
    logits, tokens = torch.zeros(4, V, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    logits[0, 0], logits[1, 1], logits[2, 0], logits[3, :4] = 90.0, -90.0, 90.0, -90.0
    return logits, tokens


CASES = {
    "plain": (normal(ROWS, V), ids(ROWS), {}),
    "batch": (normal(2, 3, V), ids(2, 3), {}),
    "temperature": (normal(ROWS, V), ids(ROWS), {"temperature": 0.7}),
    "temperatures": (normal(2, 3, V), ids(2, 3), {"temperature": torch.linspace(0.3, 2.0, 6).view(2, 3)}),
    "softcap": (normal(ROWS, V), ids(ROWS), {"softcap": 2.0, "temperature": 1.3}),
    "impossible": (*truncated(), {}),
    "impossible, softcap": (*truncated(), {"softcap": 5.0}),
    "gaps": (*gaps(), {}),
    "one entry": (normal(3, 1), torch.zeros(3, dtype=torch.long), {}),
}


@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [
        *((name, dtype, "torch") for name in CASES for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        # Float32 alone is enough of a backend that is compiled or interpreted anew for each case.
        *((name, torch.float32, backend) for backend in OTHERS for name in CASES if name != "batch"),
        *(("temperatures", torch.bfloat16, backend) for backend in OTHERS),
    ],
)
def test_values_are_those_of_float64_on_the_same_bits(name, dtype, backend):
    logits, tokens, options = CASES[name]
    logits = logits.to(dtype)
    for got, wanted in zip(
        logits_logprobs(logits, tokens, **options, backend=backend), exact(logits, tokens, **options), strict=True
    ):
        assert got.dtype == torch.float32
        np.testing.assert_allclose(got.numpy(), wanted, rtol=2e-6, atol=2e-5)


def test_float64_stays_float64():
    logits, tokens = normal(ROWS, V), ids(ROWS)
    for got, wanted in zip(logits_logprobs(logits, tokens), exact(logits, tokens), strict=True):
        assert got.dtype == torch.float64
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-13, atol=1e-13)


def jax_gradients(logits, tokens, cotangents, options):
    array = jnp.asarray(logits.numpy())
    options = {k: jnp.asarray(v.numpy()) if isinstance(v, torch.Tensor) else v for k, v in options.items()}

    def pulled(x, c):
        return jax.vjp(lambda x: tuple(rl_fn.logits_logprobs(x, jnp.asarray(tokens.numpy()), **options)), x)[1](c)[0]

    return np.array(jax.jit(pulled)(array, tuple(jnp.asarray(c.numpy()) for c in cotangents)))


def torch_gradients(logits, tokens, cotangents, options):
    leaf = logits.clone().requires_grad_()
    torch.autograd.backward(tuple(logits_logprobs(leaf, tokens, **options, backend="torch")), cotangents)
    assert leaf.grad is not None
    return leaf.grad.numpy()


@pytest.mark.parametrize("name", ["temperatures", "softcap", "impossible", "impossible, softcap", "gaps"])
def test_gradients_are_those_of_rl_fn(name):
    logits, tokens, options = CASES[name]
    logits = logits.float()
    cotangents = tuple(normal(*tokens.shape, seed=seed).float() for seed in (5, 6, 7))
    np.testing.assert_allclose(
        torch_gradients(logits, tokens, cotangents, options),
        jax_gradients(logits, tokens, cotangents, options),
        rtol=2e-5,
        atol=2e-5,
    )


def test_an_impossible_token_and_an_impossible_row_are_finite_in_gradient_as_in_rl_fn():
    logits = torch.tensor([[0.0, 1.0, -INF], [-INF, -INF, -INF]])
    tokens = torch.tensor([2, 0])
    values = logits_logprobs(logits, tokens, backend="torch")
    for got, wanted in zip(values, logits_logprobs(logits, tokens, backend="reference"), strict=True):
        np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=1e-6)
    assert values.logprobs.tolist() == [-INF, -INF]
    for cotangents in torch.eye(3)[:, :, None].expand(3, 3, 2):
        gradient = torch_gradients(logits, tokens, tuple(cotangents), {})
        np.testing.assert_allclose(gradient, jax_gradients(logits, tokens, tuple(cotangents), {}), atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "softcap": 3.0}])
def test_gradcheck(options):
    logits, tokens = normal(4, 5).requires_grad_(), torch.tensor([0, 4, 2, 2])
    assert torch.autograd.gradcheck(lambda x: tuple(logits_logprobs(x, tokens, **options)), (logits,))


def test_gradcheck_beside_impossible_entries():
    allowed = normal(3, 4).requires_grad_()
    impossible = torch.full((3, 2), -INF, dtype=torch.float64)
    tokens = torch.tensor([0, 3, 1])
    assert torch.autograd.gradcheck(lambda x: tuple(logits_logprobs(torch.cat([x, impossible], 1), tokens)), (allowed,))


@pytest.mark.parametrize("rows_a_chunk", [1, 4, ROWS])
def test_chunks_change_nothing(monkeypatch, rows_a_chunk):
    logits, tokens = normal(ROWS, V).float(), ids(ROWS)
    options = {"temperature": torch.linspace(0.5, 2.0, ROWS), "softcap": 4.0}
    cotangents = tuple(normal(ROWS, seed=seed).float() for seed in (5, 6, 7))

    def everything():
        values = logits_logprobs(logits, tokens, **options)
        return [*(v.numpy() for v in values), torch_gradients(logits, tokens, cotangents, options)]

    whole = everything()
    monkeypatch.setattr(torch_backend, "_CHUNK", rows_a_chunk * V + V // 2)
    for got, wanted in zip(everything(), whole, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_a_chunk_smaller_than_a_row_still_takes_the_row(monkeypatch):
    monkeypatch.setattr(torch_backend, "_CHUNK", 1)
    logits, tokens = normal(3, V).float(), ids(3)
    np.testing.assert_allclose(logits_logprobs(logits, tokens).logprobs, exact(logits, tokens)[0], atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_do_not_matter(backend):
    stored = normal(V, 6, ROWS).float()
    logits, tokens = stored.permute(2, 1, 0)[::2], ids(6, 7).T
    assert not logits.is_contiguous() and not tokens.is_contiguous()
    options = {"temperature": torch.linspace(0.5, 2.0, 6 * 7).view(6, 7).T}
    for got, wanted in zip(
        logits_logprobs(logits, tokens, **options, backend=backend), exact(logits, tokens, **options), strict=True
    ):
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-6, atol=1e-5)


def test_the_gradient_of_a_view_goes_through():
    leaf, tokens = normal(V, ROWS).float().requires_grad_(), ids(ROWS)
    logits_logprobs(leaf.T, tokens).logprobs.sum().backward()
    ones, zeros = torch.ones(ROWS), torch.zeros(ROWS)
    wanted = jax_gradients(leaf.detach().T.contiguous(), tokens, (ones, zeros, zeros), {})
    assert leaf.grad is not None
    np.testing.assert_allclose(leaf.grad.T.numpy(), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "backend"), [((0,), "torch"), ((3, 0), "torch"), *(((0, 5), backend) for backend in BACKENDS)]
)
def test_no_rows(shape, backend):
    for value in logits_logprobs(torch.zeros(*shape, V), torch.zeros(shape, dtype=torch.long), backend=backend):
        assert value.shape == shape and value.dtype == torch.float32


def test_no_rows_have_a_gradient():
    logits = torch.zeros(0, V, requires_grad=True)
    logits_logprobs(logits, torch.zeros(0, dtype=torch.long)).entropy.sum().backward()
    assert logits.grad is not None and logits.grad.shape == (0, V)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_token_ids_of_any_integer_dtype(dtype):
    logits, tokens = normal(ROWS, V).float().requires_grad_(), ids(ROWS)
    result = logits_logprobs(logits, tokens.to(dtype))
    assert torch.equal(result.logprobs, logits_logprobs(logits, tokens).logprobs)
    result.logprobs.sum().backward()
    assert logits.grad is not None and bool(logits.grad.any())


def test_the_gradient_has_the_dtype_of_the_logits():
    logits = normal(ROWS, V).bfloat16().requires_grad_()
    logits_logprobs(logits, ids(ROWS)).logprobs.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16
