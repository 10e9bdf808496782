"""Quantisation on the way, against rl_fn's own functions."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import rl_fn
from rl_bridge.weights.source import BLOCK, LAYOUTS, Cast, Quantize, linear_weights, precision_map

WEIGHT = "model.layers.0.mlp.up_proj.weight"
# Half of a step, as a share of the largest number that shares the scale; of fp8 a step is 1/16 of the number itself.
BOUNDS = {"int8": 1 / 255, "fp8": 2**-4, "fp8_channel": 2**-4, "fp8_block": 2**-4}


def weight(rows=200, columns=130, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 1, rows)[:, None]


def sent(precision, tensor, dtype=torch.float32):
    pairs = list(Quantize(precision, frozenset([WEIGHT]), dtype=dtype)(WEIGHT, tensor))
    assert [name for name, _ in pairs] == [WEIGHT, f"{WEIGHT}_scale"]
    return [tensor for _, tensor in pairs]


def by_rl_fn(precision, tensor):
    scheme, granularity = LAYOUTS[precision]
    w = jnp.asarray(tensor.float().numpy())
    if scheme == "int8":
        return rl_fn.quantize_int8(w)
    return rl_fn.quantize_fp8(w, granularity=granularity, block=BLOCK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("precision", LAYOUTS)
def test_codes_and_scales_are_rl_fns_of_the_bytes_that_are_sent(precision, dtype):
    w = weight()
    codes, scale = sent(precision, w, dtype)
    wanted = by_rl_fn(precision, w.to(dtype))
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), np.asarray(wanted.values).view(np.uint8))
    np.testing.assert_array_equal(scale.numpy().ravel(), np.asarray(wanted.scale).ravel())
    assert codes.dtype == LAYOUTS[precision].dtype
    assert scale.shape == {"int8": (200, 1), "fp8": (1,), "fp8_channel": (200, 1), "fp8_block": (2, 2)}[precision]


@pytest.mark.parametrize("precision", LAYOUTS)
def test_what_comes_back_is_within_half_a_step(precision):
    w = weight()
    codes, scale = sent(precision, w)
    block = BLOCK if precision == "fp8_block" else None
    shape = scale.shape if precision != "fp8" else (1, 1)
    back = np.asarray(
        rl_fn.dequantize(jnp.asarray(codes.float().numpy()), jnp.asarray(scale.view(shape).numpy()), block=block)
    )
    error = np.abs(back - w.numpy())
    largest = np.abs(w.numpy()).max(1, keepdims=True)
    step = largest if precision == "int8" else np.abs(w.numpy())
    # Numbers below fp8's smallest normal one, 2⁻⁶ of a scale, have a fixed step.
    floor = 0.0 if precision == "int8" else 2**-10 * float(scale.max())
    # The product of code and scale is rounded once more.
    assert (error <= BOUNDS[precision] * step * (1 + 3e-5) + floor).all()
    assert error.max() > 0


@pytest.mark.parametrize("precision", LAYOUTS)
def test_the_outline_is_what_is_sent(precision):
    """A sync plans with meta tensors."""
    send = Quantize(precision, frozenset([WEIGHT]))
    for name, shape in ((WEIGHT, (200, 130)), ("model.norm.weight", (16,)), ("lm_head.weight", (9, 16))):
        found = [
            [(n, t.shape, t.dtype) for n, t in send(name, made)]
            for made in (torch.empty(shape, device="meta"), torch.ones(shape))
        ]
        assert found[0] == found[1]


def test_what_is_not_named_keeps_its_values_in_the_dtype_of_the_rollout():
    send = Quantize("int8", frozenset([WEIGHT]), dtype=torch.bfloat16)
    tensor = torch.tensor([[1.0, 1.001]])
    [(name, made)] = send("lm_head.weight", tensor)
    assert name == "lm_head.weight"
    assert torch.equal(made, tensor.bfloat16())
    [(_, made)] = send("model.inv_index", torch.tensor([3]))
    assert made.dtype == torch.int64


@pytest.mark.parametrize("precision", LAYOUTS)
def test_zeros_are_zeros_and_equal_weights_give_equal_bits(precision):
    codes, scale = sent(precision, torch.zeros(130, 7))
    assert not codes.float().any()
    assert bool((scale == 2.0**-23).all())
    again = [sent(precision, weight()) for _ in range(2)]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*again, strict=True))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("precision", LAYOUTS)
def test_numbers_that_are_not_finite_are_refused_by_name(precision, bad):
    w = weight()
    w[150, 3] = bad
    with pytest.raises(ValueError, match=r"up_proj\.weight' has numbers that are not finite"):
        sent(precision, w)


@pytest.mark.parametrize("tensor", [torch.ones(3), torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.int8)])
def test_what_is_no_matrix_of_floats_is_refused_by_name(tensor):
    with pytest.raises(ValueError, match=r"up_proj\.weight' cannot be quantised"):
        sent("int8", tensor)


def test_impossible_maps_are_refused():
    with pytest.raises(ValueError, match="precision must be one of int8, fp8, fp8_channel, fp8_block, got 'int4'"):
        Quantize("int4", frozenset())
    with pytest.raises(ValueError, match=r"only tensors named ….weight are quantised, got 'experts.up'"):
        Quantize("int8", frozenset(["experts.up"]))
    with pytest.raises(ValueError, match="Embedding has no linear layers"):
        linear_weights(torch.nn.Embedding(2, 2))


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_and_the_embeddings_are_kept_high(new_model, tied):
    model = new_model()
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    names = linear_weights(model)
    matrices = {name for name, p in model.named_parameters(remove_duplicate=False) if p.dim() == 2}
    assert matrices - names == {"lm_head.weight", "model.embed_tokens.weight"}
    assert len(names) == 2 * 7
    assert precision_map("fp8", model, dtype=torch.float16) == Quantize("fp8", names, torch.float16)
    assert precision_map("bf16", model, dtype=torch.bfloat16) == Cast(torch.bfloat16)
