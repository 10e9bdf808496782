"""Cases of aggregation."""

import numpy as np

from tests.rl_fn.cases.base import B, T, case

for _mode in (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
):
    _horizon = {"max_completion_length": 16} if _mode == "seq-mean-token-sum-norm" else {}
    _shape = (2, B, T) if _mode == "prompt-mean" else (B, T)
    for _name in ("aggregate_parts", "aggregate"):
        case(
            f"{_name}[{_mode}]",
            lambda d, mode=_mode, extra=_horizon, shape=_shape: ((d.normal(*shape), d.mask(*shape), mode), dict(extra)),
            differentiable=(0,),
            mask=1,
        )
    if _mode != "prompt-mean":
        case(
            f"aggregate[{_mode}, packed]",
            lambda d, mode=_mode, extra=_horizon: (
                (d.normal(), d.mask(), mode),
                {"segment_ids": d.segments(), **extra},
            ),
            differentiable=(0,),
            mask=1,
        )
case(
    "aggregate[denominator]",
    lambda d: ((d.normal(), d.mask(), "token-mean"), {"denominator": np.array(40.0, np.float32)}),
    differentiable=(0,),
    mask=1,
)
for _name in ("masked_sum", "masked_mean", "masked_var"):
    case(_name, lambda d: ((d.normal(), d.mask()), {}), differentiable=(0,), mask=1)
    case(f"{_name}[axis]", lambda d: ((d.normal(), d.mask()), {"axis": -1}), differentiable=(0,), mask=1)
