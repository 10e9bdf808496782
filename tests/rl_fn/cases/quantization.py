"""Cases of quantisation."""

from tests.rl_fn.cases.base import case

OUT, IN = 5, 12

case("quantize_int8", lambda d: ((d.normal(OUT, IN),), {}))
case("quantize_int8[tensor]", lambda d: ((d.normal(OUT, IN),), {"axis": None, "half_range": 127}))
case("quantize_fp8", lambda d: ((d.normal(OUT, IN),), {}))
case("quantize_fp8[tensor]", lambda d: ((d.normal(2, OUT, IN),), {"granularity": "tensor"}))
case("quantize_fp8[block]", lambda d: ((d.normal(OUT, IN),), {"granularity": "block", "block": 4}))
case(
    "dequantize",
    lambda d: ((d.integers(128, OUT, IN, low=-128), d.uniform(0.1, 1, OUT, 1)), {}),
    differentiable=(1,),
)
case(
    "dequantize[block]",
    lambda d: ((d.integers(128, OUT, IN, low=-128), d.uniform(0.1, 1, 2, 3)), {"block": 4}),
    differentiable=(1,),
)
case("smooth_scales", lambda d: ((d.positive(IN) + 0.1, d.normal(OUT, IN)), {"alpha": 0.7}), differentiable=(0, 1))
