"""Which kernels a backend's name means where, and what is refused with which words."""

import importlib
from typing import Any

import jax.numpy as jnp
import pytest

from rl_kernels import in_jax

X, TOKENS = jnp.zeros((2, 4)), jnp.zeros(2, jnp.int32)


@pytest.fixture
def ran(monkeypatch):
    """The kernels that were asked to run, without running them."""
    names = []
    for operation in ("logits", "linear"):
        for file in ("pallas", "pallas_gpu"):
            module = importlib.import_module(in_jax._MODULES[file].format(f"{operation}_logprobs"))

            def record(x, *rest, name=f"{operation} {file}"):
                names.append((name, rest[-1].interpret))
                return jnp.zeros((2, 1)), jnp.zeros(2), jnp.zeros(2)

            monkeypatch.setattr(module, "run", record)
    return names


def both(backend):
    in_jax.logits_logprobs(X, TOKENS, backend=backend)
    in_jax.linear_logprobs(X, jnp.ones((5, 4)), TOKENS, backend=backend)


@pytest.mark.parametrize(
    ("device", "backend", "file", "interpret"),
    [
        ("cpu", None, None, None),
        ("cpu", "reference", None, None),
        ("cpu", "pallas", "pallas", True),
        ("cpu", "pallas_gpu", "pallas_gpu", True),
        ("tpu", None, "pallas", False),
        # No GPU has timed them: on request.
        ("gpu", None, None, None),
        ("gpu", "pallas", "pallas_gpu", False),
        ("gpu", "pallas_gpu", "pallas_gpu", False),
    ],
)
def test_the_backend_asked_for_runs(monkeypatch, ran, device, backend, file, interpret):
    monkeypatch.setattr(in_jax.jax, "default_backend", lambda: device)
    both(backend)
    assert ran == ([] if file is None else [(f"logits {file}", interpret), (f"linear {file}", interpret)])


@pytest.mark.parametrize(
    ("device", "backend", "message"),
    [
        ("cpu", "triton", "no backend 'triton' for JAX arrays; available: pallas, pallas_gpu, reference"),
        ("tpu", "pallas_gpu", "backend 'pallas_gpu' has kernels for GPUs only, not for tpu"),
        ("METAL", "pallas", "backend 'pallas' has kernels for TPU and GPU, not for METAL"),
    ],
)
def test_what_cannot_run_is_refused(monkeypatch, ran, device, backend, message):
    monkeypatch.setattr(in_jax.jax, "default_backend", lambda: device)
    with pytest.raises(NotImplementedError, match=message):
        both(backend)
    assert not ran


@pytest.mark.parametrize("backend", in_jax.BACKENDS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": jnp.zeros((3, 2), jnp.int32)}, r"tokens must have shape \(2,\), .*got \(3, 2\)"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"softcap": -1.0}, "softcap must be positive, got -1.0"),
        ({"logit_scale": 0.0}, "logit_scale must be positive, got 0.0"),
        ({"mask": jnp.ones(2)}, r"mask must be bool \(2,\), got float32 \(2,\)"),
        ({"mask": jnp.ones((2, 1), bool)}, r"mask must be bool \(2,\), got bool \(2, 1\)"),
    ],
)
def test_bad_arguments_are_named(backend, change, message):
    arguments = {"logits": X, "tokens": TOKENS} | change
    with pytest.raises(ValueError, match=message):
        in_jax.logits_logprobs(**arguments, backend=backend)


def test_bad_arguments_of_the_model_and_the_blocks_are_named():
    def refused(message, *arrays, **options):
        function: Any = in_jax.linear_logprobs if arrays else in_jax.logits_logprobs
        with pytest.raises(ValueError, match=message):
            function(X, *arrays, TOKENS, backend="pallas_gpu", **options)

    weight = jnp.ones((5, 4))
    refused(r"weight must be \(V, 4\), got \(5, 3\)", weight[:, :3])
    refused("workspace must be a positive number of bytes, got 0", weight, workspace=0)
    refused("block_tokens must be a power of two, at least 16, for a GPU's kernels, got 8", weight, block_tokens=8)
    refused("block_vocab must be a power of two, at least 16, for a GPU's kernels, got 48", weight, block_vocab=48)
    refused("block_tokens must be a power of two, at least 1, .* got 3", block_tokens=3)
