"""Every backend of the JAX operations against float64: Pallas's kernels for TPU and for GPUs in its interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from rl_kernels import in_jax
from tests.kernels.exact import gradients
from tests.kernels.in_jax.arrays import (
    BACKENDS,
    BLOCKS,
    CASES,
    EVERY_ROW,
    ROWS,
    as_jax,
    compare,
    cotangents,
    floats,
    masked,
    rows,
    run,
    tokens,
    wanted,
)

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_operation = pytest.mark.parametrize("operation", ["logits", "linear"])
each_kernel = pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])


@each_operation
@each_backend
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(operation, backend, case):
    options = CASES[case]
    targets = 3 if case in ("numbers", "everything") else None
    leaves, drawn = [x.requires_grad_() for x in floats(operation)], tokens(targets)
    # Float32 rounds a cold row's logits by 6e-8 · |z| / temperature, and the gradient as much, relatively.
    size = max(1.0, 1.0 / torch.as_tensor(options["temperature"]).min().item())
    found = run(operation, backend, leaves, drawn, options, targets)
    compare(found, leaves, wanted(operation, leaves, drawn, options), targets, size)


@each_operation
@each_backend
def test_rows_left_out_may_hold_anything(operation, backend):
    """NaN and infinity there reach nothing; the other rows' bits are the same."""
    options = {"temperature": rows(1.0), "mask": masked()}
    leaves, drawn = floats(operation), tokens()
    clean = run(operation, backend, leaves, drawn, options)
    leaves[0][0], leaves[0][4] = float("nan"), float("inf")
    for a, b in zip(
        jax.tree.leaves(clean), jax.tree.leaves(run(operation, backend, leaves, drawn, options)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@each_operation
@each_kernel
def test_not_a_number_in_a_row_that_counts_stays_in_its_row(operation, backend):
    leaves, drawn = floats(operation), tokens()
    leaves[0][7, 3] = float("nan")
    values, pulled = run(operation, backend, leaves, drawn, {"temperature": rows(1.0), "mask": EVERY_ROW})
    for x in (*values, jnp.sum(pulled[0], axis=1)):
        assert np.flatnonzero(np.isnan(x)).tolist() == [7]


@each_operation
@each_kernel
def test_bfloat16(operation, backend):
    """What is summed is summed in float32, and rounded once."""
    leaves = [x.bfloat16().double().requires_grad_() for x in floats(operation)]
    options = {"temperature": rows(1.0), "mask": EVERY_ROW}
    values, pulled = run(operation, backend, leaves, tokens(), options, dtype=jnp.bfloat16)
    outputs = wanted(operation, leaves, tokens(), options)
    for a, b in zip(values, outputs, strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-5, atol=1e-4)
    for a, b in zip(pulled, gradients(outputs, cotangents(), leaves), strict=True):
        assert a.dtype == jnp.bfloat16
        # bfloat16 keeps 8 bits: of an element, and of the largest term where a product's cancel.
        largest = b.nan_to_num().abs().max().item()
        np.testing.assert_allclose(a.astype(jnp.float32), b.nan_to_num(), rtol=1 / 128, atol=largest / 256)


@each_operation
@each_kernel
def test_mapped_over_a_batch(operation, backend):
    """jit of grad of vmap, with every option mapped or not."""
    options = CASES["everything"]
    leaves, drawn = [x.requires_grad_() for x in floats(operation)], tokens(3)
    arrays = [as_jax(x.detach()) for x in leaves]
    per_row = {k: as_jax(options[k]) for k in ("temperature", "mask")}
    allowed_tokens = as_jax(options["allowed_tokens"])

    def loss(arrays):
        first, *model = arrays

        def one(x, ids, row, allowed):
            more = dict(zip(("weight", "bias"), model, strict=True)) if operation == "linear" else {}
            out = getattr(in_jax, f"{operation}_logprobs")(
                x,
                tokens=ids,
                softcap=4.0,
                logit_scale=1.5,
                allowed_tokens=allowed,
                backend=backend,
                **row,
                **more,
                **BLOCKS[operation, backend],
            )
            held = jnp.isfinite(out.logprobs)
            return jnp.sum(jnp.where(held, out.logprobs, 0.0)) - 0.1 * jnp.sum(out.entropy)

        def cut(x):
            return x.reshape(3, 7, *x.shape[1:])

        return jnp.sum(jax.vmap(one)(cut(first), cut(as_jax(drawn)), jax.tree.map(cut, per_row), cut(allowed_tokens)))

    outputs = wanted(operation, leaves, drawn, options)
    total = torch.where(outputs[0].isfinite(), outputs[0], 0.0).sum() - 0.1 * outputs[1].sum()
    for a, b in zip(jax.jit(jax.grad(loss))(arrays), torch.autograd.grad(total, leaves), strict=True):
        np.testing.assert_allclose(a, b.nan_to_num(), rtol=3e-5, atol=1e-4)


@each_operation
def test_on_a_gpu_a_row_has_the_same_bits_in_any_company(operation):
    leaves, options = (
        [as_jax(x) for x in floats(operation)],
        {"backend": "pallas_gpu", **BLOCKS[operation, "pallas_gpu"]},
    )
    drawn = as_jax(tokens())

    def forward(count):
        return getattr(in_jax, f"{operation}_logprobs")(leaves[0][:count], *leaves[1:2], drawn[:count], **options)

    for a, b in zip(forward(ROWS), forward(3), strict=True):
        np.testing.assert_array_equal(a[:3], b)


@each_operation
@each_backend
def test_no_rows_and_no_tokens(operation, backend):
    def shapes(batch, drawn):
        leading = (jnp.zeros((*batch, 4)),) if operation == "logits" else (jnp.zeros((*batch, 3)), jnp.zeros((4, 3)))
        out = getattr(in_jax, f"{operation}_logprobs")(*leading, jnp.zeros(drawn, jnp.int32), backend=backend)
        np.testing.assert_allclose(out.entropy, np.log(4.0), rtol=1e-6)
        return tuple(x.shape for x in out)

    assert shapes((0,), (0,)) == ((0,), (0,), (0,))
    assert shapes((2, 1), (2, 1, 0)) == ((2, 1, 0), (2, 1), (2, 1))
