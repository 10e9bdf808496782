"""Pallas's kernels in its interpreter, and lowered for TPU; both backends against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import export

from rl_kernels import in_jax
from tests.kernels.cases import INF, OPTIONS, N, V, ids, normal, tokens_for
from tests.kernels.exact import exact, gradients, kept_set

H = 19
BLOCKS = {"block_rows": 8, "block_entries": 128}
NAMES = ["plain", "temperature", "temperatures", "softcap", "support", "bool support"]
each_backend = pytest.mark.parametrize("backend", ["pallas", "reference"])


def as_jax(options):
    """The options in JAX, with a support as bool."""
    found = {
        k: jnp.asarray(v.float().numpy()) if k == "temperature" and not isinstance(v, float) else v
        for k, v in options.items()
    }
    if "support" in options:
        found["support"] = jnp.asarray(kept_set(options["support"], V, N).numpy())
    return found


def cotangents(targets):
    first = normal(N, seed=5) if targets is None else normal(N, targets, seed=5)
    return first, normal(N, seed=6), normal(N, seed=7)


# A cold row's logits are large: float32 rounds them by 6e-8 · |z| / temperature, and the gradient as much, relatively.
def compare(function, arrays, outputs, leaves, targets, size=1.0):
    """Values and gradients of a JAX function of ``arrays`` with float64 torch's ``outputs`` of ``leaves``."""
    c = cotangents(targets)

    def both(arrays, c):
        values, pull = jax.vjp(lambda *a: tuple(function(*a)), *arrays)
        return values, pull(c)

    values, pulled = jax.jit(both)(arrays, tuple(jnp.asarray(x.float().numpy()) for x in c))
    for a, b in zip(values, outputs, strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-5, atol=1e-5 * max(10.0, size))
    for a, b in zip(pulled, gradients(outputs, c, leaves), strict=True):
        np.testing.assert_allclose(a, b.nan_to_num().numpy(), rtol=1e-5 * max(3.0, size), atol=1e-4 * size)


@each_backend
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("targets", [None, 3])
def test_logits(backend, name, targets):
    options = OPTIONS[name]
    logits, tokens = normal(N, V).float(), tokens_for(options, targets=targets)
    logits[1, ::2] = -INF
    double = logits.double().requires_grad_()
    blocks = BLOCKS if backend == "pallas" else {}
    size = max(1.0, 1.0 / torch.as_tensor(options.get("temperature", 1.0)).min().item())

    def function(x):
        ids = jnp.asarray(tokens.numpy().astype(np.int32))
        return in_jax.logits_logprobs(x, ids, **as_jax(options), **blocks, backend=backend)

    compare(function, (jnp.asarray(logits.numpy()),), exact(double, tokens, **options), [double], targets, size)


@each_backend
@pytest.mark.parametrize("name", NAMES)
def test_linear(backend, name):
    options = OPTIONS[name]
    arrays = normal(N, H, scale=1.0).float(), normal(V, H, scale=1.0, seed=1).float(), normal(V, seed=2).float()
    tokens = tokens_for(options, targets=3)
    doubles = [x.double().requires_grad_() for x in arrays]
    blocks = BLOCKS if backend == "pallas" else {}
    size = max(1.0, 1.0 / torch.as_tensor(options.get("temperature", 1.0)).min().item())

    def function(hidden, weight, bias):
        ids = jnp.asarray(tokens.numpy().astype(np.int32))
        return in_jax.linear_logprobs(hidden, weight, ids, bias=bias, **as_jax(options), **blocks, backend=backend)

    outputs = exact(doubles[0] @ doubles[1].T + doubles[2], tokens, **options)
    compare(function, tuple(jnp.asarray(x.numpy()) for x in arrays), outputs, doubles, 3, size)


def test_many_blocks_both_ways():
    """21 rows of 8, 300 entries of 128: every kernel sees first, middle and cut-off blocks."""
    rows, vocabulary = 21, 300
    hidden, weight = normal(rows, H, scale=1.0).float(), normal(vocabulary, H, scale=1.0, seed=1).float()
    tokens = ids(rows, high=vocabulary)
    doubles = [x.double().requires_grad_() for x in (hidden, weight)]
    outputs = exact(doubles[0] @ doubles[1].T, tokens)
    wanted = torch.autograd.grad((outputs[0] - 0.1 * outputs[1]).sum(), doubles)

    def loss(h, w):
        out = in_jax.linear_logprobs(h, w, jnp.asarray(tokens.numpy()), **BLOCKS, backend="pallas")
        return jnp.sum(out.logprobs - 0.1 * out.entropy)

    found = jax.jit(jax.grad(loss, (0, 1)))(jnp.asarray(hidden.numpy()), jnp.asarray(weight.numpy()))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b.numpy(), rtol=2e-5, atol=2e-5)


def test_bfloat16_is_accumulated_in_float32():
    hidden, weight = (normal(N, H, scale=1.0).bfloat16(), normal(V, H, scale=1.0, seed=1).bfloat16())
    tokens = ids(N)
    out = in_jax.linear_logprobs(
        jnp.asarray(hidden.float().numpy(), jnp.bfloat16),
        jnp.asarray(weight.float().numpy(), jnp.bfloat16),
        jnp.asarray(tokens.numpy()),
        **BLOCKS,
        backend="pallas",
    )
    wanted = exact(hidden.double() @ weight.double().T, tokens)
    for a, b in zip(out, wanted, strict=True):
        np.testing.assert_allclose(a, b.numpy(), atol=1e-5)


@pytest.mark.parametrize("function", ["logits", "linear"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_lowers_for_tpu(monkeypatch, function, backward, dtype):
    """At Llama-3's sizes, without a TPU: Mosaic accepts the kernels."""
    # Traced as on a TPU: the kernels themselves, not their interpretation.
    monkeypatch.setattr(in_jax.jax, "default_backend", lambda: "tpu")
    rows, features, vocabulary = 512, 4096, 128256
    tokens = jax.ShapeDtypeStruct((rows,), jnp.int32)
    logits = jax.ShapeDtypeStruct((rows, vocabulary), dtype)
    hidden, weight = jax.ShapeDtypeStruct((rows, features), dtype), jax.ShapeDtypeStruct((vocabulary, features), dtype)
    floats = (logits,) if function == "logits" else (hidden, weight)

    def loss(*arguments):
        out = getattr(in_jax, f"{function}_logprobs")(*arguments, softcap=30.0)
        return jnp.sum(out.logprobs - 0.1 * out.entropy)

    run = jax.grad(loss, tuple(range(len(floats)))) if backward else loss
    module = export.export(jax.jit(run), platforms=["tpu"])(*floats, tokens).mlir_module()
    kernels = {("logits", False): 1, ("logits", True): 2, ("linear", False): 1, ("linear", True): 3}
    assert module.count("tpu_custom_call") >= kernels[function, backward]


def test_the_backend_asked_for_runs(monkeypatch):
    import importlib

    ran = []
    for operation in ("logits", "linear"):
        module = importlib.import_module(f"rl_kernels.{operation}_logprobs.pallas")
        monkeypatch.setattr(module, "run", lambda *a, f=module.run, o=operation: (ran.append(o), f(*a))[1])
    x, tokens = jnp.zeros((2, 4)), jnp.zeros(2, jnp.int32)
    for backend in ("pallas", "reference", None):
        in_jax.logits_logprobs(x, tokens, backend=backend)
        in_jax.linear_logprobs(x, jnp.ones((5, 4)), tokens, backend=backend)
    assert ran == ["logits", "linear"]
    with pytest.raises(NotImplementedError, match="no backend 'triton' for JAX arrays; available: pallas, reference"):
        in_jax.logits_logprobs(x, tokens, backend="triton")


@each_backend
def test_no_rows(backend):
    out = in_jax.linear_logprobs(jnp.zeros((0, 3)), jnp.zeros((5, 3)), jnp.zeros(0, jnp.int32), backend=backend)
    assert all(x.shape == (0,) for x in out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": jnp.zeros((3, 2), jnp.int32)}, r"tokens must have shape \(2,\), .*got \(3, 2\)"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"softcap": -1.0}, "softcap must be positive, got -1.0"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"logits": jnp.zeros((2, 4)), "tokens": jnp.zeros(2, jnp.int32)} | change
    with pytest.raises(ValueError, match=message):
        in_jax.logits_logprobs(**arguments, backend="pallas")
