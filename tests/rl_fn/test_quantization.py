"""Quantisation: the convention bit for bit, bounds on the round trip, what is not finite stays visible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_fn
from tests.oracle.lookup import ORACLE

SEEDS = st.integers(0, 2**32 - 1)
INT8 = {"row": {"axis": -1}, "column": {"axis": 0}, "tensor": {"axis": None}, "127": {"half_range": 127}}
FP8 = {"channel": {}, "tensor": {"granularity": "tensor"}, "block": {"granularity": "block", "block": 16}}


def weights(seed, rows=24, columns=40):
    """Rows of very different magnitude, one of them zero, some elements exactly on a tie."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(rows, columns)) * 10.0 ** rng.uniform(-6, 3, (rows, 1))
    w[1] = 0.0
    w[2] = np.arange(columns) + 0.5
    return w.astype(np.float32)


def bits(x):
    return np.asarray(x).view(np.uint8)


quantize_int8 = {
    name: jax.jit(lambda w, options=options: rl_fn.quantize_int8(w, **options)) for name, options in INT8.items()
}
quantize_fp8 = {
    name: jax.jit(lambda w, options=options: rl_fn.quantize_fp8(w, **options)) for name, options in FP8.items()
}


@pytest.mark.parametrize("name", INT8)
@given(seed=SEEDS)
def test_int8_is_the_convention_bit_for_bit(name, seed):
    w = weights(seed)
    for got in (quantize_int8[name](w), rl_fn.quantize_int8(w, **INT8[name])):
        values, scale = ORACLE["quantize_int8"](w, **INT8[name])
        np.testing.assert_array_equal(got.scale, scale)
        np.testing.assert_array_equal(got.values, values)


@pytest.mark.parametrize("name", FP8)
@given(seed=SEEDS)
def test_fp8_is_the_convention_bit_for_bit(name, seed):
    w = weights(seed, rows=20, columns=36)
    values, scale = ORACLE["quantize_fp8"](w, **FP8[name])
    got = quantize_fp8[name](w)
    np.testing.assert_array_equal(got.scale, scale)
    np.testing.assert_array_equal(np.asarray(got.values, np.float64), values)
    np.testing.assert_array_equal(bits(got.values), bits(rl_fn.quantize_fp8(w, **FP8[name]).values))


@pytest.mark.parametrize("name", INT8)
@given(seed=SEEDS)
def test_int8_round_trip_is_within_half_a_step(name, seed):
    w = weights(seed)
    q = quantize_int8[name](w)
    error = np.abs(np.asarray(rl_fn.dequantize(q.values, q.scale), np.float64) - w)
    assert (error <= np.asarray(q.scale, np.float64) * (0.5 + 1e-4)).all()


@pytest.mark.parametrize("name", FP8)
@given(seed=SEEDS)
def test_fp8_round_trip_is_within_a_sixteenth(name, seed):
    """Three mantissa bits: half a step is 1/16 of a normal number, and 2⁻¹⁰ scales below the smallest normal 2⁻⁶."""
    w = weights(seed)
    q = quantize_fp8[name](w)
    block = FP8[name].get("block")
    back = np.asarray(rl_fn.dequantize(q.values, q.scale, block=block), np.float64)
    step = np.asarray(rl_fn.dequantize(jnp.ones(w.shape, jnp.int8), q.scale, block=block), np.float64)
    assert (np.abs(back - w) <= np.maximum(np.abs(w) / 16, step * 2.0**-10) * (1 + 1e-5)).all()


@given(seed=SEEDS)
def test_requantising_with_half_range_127_5_moves_only_the_most_negative_code(seed):
    q = quantize_int8["row"](weights(seed))
    again = quantize_int8["row"](rl_fn.dequantize(q.values, q.scale))
    before, after = np.asarray(q.values, int), np.asarray(again.values, int)
    assert ((before == after) | ((before <= -127) & (after <= -127))).all()


@pytest.mark.parametrize("quantize", [quantize_int8["127"], *quantize_fp8.values()])
@given(seed=SEEDS)
def test_requantising_keeps_every_code(quantize, seed):
    q = quantize(weights(seed))
    block = 16 if q.scale.shape[-1] > 1 else None
    again = quantize(rl_fn.dequantize(q.values, q.scale, block=block))
    np.testing.assert_array_equal(bits(again.values), bits(q.values))


@given(seed=SEEDS)
def test_requantising_with_half_range_127_keeps_the_scale_too(seed):
    q = quantize_int8["127"](weights(seed))
    again = quantize_int8["127"](rl_fn.dequantize(q.values, q.scale))
    live = np.asarray(q.values).any(axis=-1)
    np.testing.assert_allclose(again.scale[live], q.scale[live], rtol=2e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_dequantises_to_nan_and_spoils_nothing_else(bad):
    w = weights(0, rows=32, columns=32)
    spoiled = w.copy()
    spoiled[5, 7] = bad
    for quantize, block, shared in (
        (quantize_int8["row"], None, np.s_[5, :]),
        (quantize_fp8["channel"], None, np.s_[5, :]),
        (quantize_fp8["block"], 16, np.s_[:16, :16]),
    ):
        clean, dirty = quantize(w), quantize(spoiled)
        inside = np.zeros(w.shape, bool)
        inside[shared] = True
        assert np.isnan(rl_fn.dequantize(dirty.values, dirty.scale, block=block)[inside]).all()
        assert (np.asarray(dirty.values, np.float32)[inside] == 0).all()
        np.testing.assert_array_equal(bits(dirty.values)[~inside], bits(clean.values)[~inside])


def test_zeros_are_zeros_with_the_smallest_scale():
    for q in (rl_fn.quantize_int8(jnp.zeros((2, 3))), rl_fn.quantize_fp8(jnp.zeros((2, 3)))):
        assert (np.asarray(q.values, np.float32) == 0).all()
        assert (np.asarray(q.scale) == 2.0**-23).all()


def test_bfloat16_weights_are_quantised_from_their_float32_values():
    w = jnp.asarray(weights(3)).astype(jnp.bfloat16)
    a, b = rl_fn.quantize_fp8(w), rl_fn.quantize_fp8(w.astype(jnp.float32))
    np.testing.assert_array_equal(bits(a.values), bits(b.values))
    np.testing.assert_array_equal(a.scale, b.scale)


@given(seed=SEEDS, alpha=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_smoothing_leaves_the_product_and_evens_the_difficulty(seed, alpha):
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(6, 10)) * 10.0 ** rng.uniform(-2, 2, 10), rng.normal(size=(4, 10))
    s = np.asarray(
        rl_fn.smooth_scales(jnp.asarray(np.abs(x).max(0), jnp.float32), jnp.asarray(w, jnp.float32), alpha=alpha)
    )
    np.testing.assert_allclose((x / s) @ (w * s).T, x @ w.T, rtol=1e-9, atol=1e-9)
    if alpha == 0.5:
        np.testing.assert_allclose(np.abs(x / s).max(0), np.abs(w * s).max(0), rtol=1e-5)
    np.testing.assert_allclose(s, ORACLE["smooth_scales"](np.abs(x).max(0), w, alpha=alpha), rtol=1e-5)


def test_a_dead_channel_is_left_alone():
    s = rl_fn.smooth_scales(jnp.array([0.0, 4.0, 4.0]), jnp.array([[1.0, 0.0, 1.0]]))
    assert s.tolist() == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rl_fn.quantize_int8(jnp.ones((2, 2)), half_range=100), "100"),
        (lambda: rl_fn.quantize_int8(jnp.ones((2, 0))), r"\(2, 0\)"),
        (lambda: rl_fn.quantize_fp8(jnp.ones((2, 2)), granularity="row"), "row"),
        (lambda: rl_fn.quantize_fp8(jnp.ones((2, 2)), granularity="block", block=0), "0"),
        (lambda: rl_fn.quantize_fp8(jnp.ones((0, 2))), r"\(0, 2\)"),
        (lambda: rl_fn.dequantize(jnp.ones((4, 4), jnp.int8), jnp.ones((2, 2))), "blocks"),
        (lambda: rl_fn.dequantize(jnp.ones((4, 4), jnp.int8), jnp.ones((2, 2)), block=4), r"\(1, 1\)"),
        (lambda: rl_fn.dequantize(jnp.ones((4, 4), jnp.int8), jnp.ones(4)), r"\(4,\)"),
        (lambda: rl_fn.smooth_scales(jnp.ones(2), jnp.ones((3, 2)), alpha=1.5), "1.5"),
    ],
)
def test_bad_arguments_raise_with_their_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.peers
@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_equals_compressed_tensors_bit_for_bit(kind, strategy):
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    if (kind, strategy) == ("int", "block"):
        pytest.skip("quantize_int8 has no blocks")
    w = weights(0, rows=32, columns=48)
    tensor = torch.from_numpy(w)
    arguments = quantization.QuantizationArgs(
        num_bits=8,
        type=kind,
        symmetric=True,
        strategy=strategy,
        block_structure=[16, 16] if strategy == "block" else None,
    )
    parts = {
        "channel": lambda: (tensor, (1,)),
        "tensor": lambda: (tensor, (0, 1)),
        "block": lambda: (tensor.reshape(2, 16, 3, 16), (1, 3)),
    }
    grouped, axes = parts[strategy]()
    smallest, largest = (f(grouped, dim=axes, keepdim=strategy == "channel") for f in (torch.amin, torch.amax))
    scale, zero_point = helpers.calculate_qparams(smallest, largest, arguments)
    dtype = torch.int8 if kind == "int" else torch.float8_e4m3fn
    expected = forward.quantize(tensor, scale, zero_point, arguments, dtype=dtype)
    int8 = {"channel": quantize_int8["row"], "tensor": quantize_int8["tensor"]}
    got = (int8 if kind == "int" else quantize_fp8)[strategy](w)
    np.testing.assert_array_equal(np.asarray(got.scale).reshape(scale.shape), scale.numpy())
    np.testing.assert_array_equal(bits(got.values), expected.view(torch.uint8).numpy())
