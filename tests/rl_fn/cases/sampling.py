"""Cases of sampling transforms."""

import numpy as np

from tests.rl_fn.cases.base import B, V, case


def _per_row(*values, dtype=np.float32):
    return np.resize(np.array(values, dtype), B)


case("temperature", lambda d: ((d.normal(B, V), 0.7), {}), differentiable=(0,))
case(
    "temperature[per-row]",
    lambda d: ((d.normal(B, V), _per_row(0.0, 0.5, 2.0)), {}),
    differentiable=(0,),
)
case("top_k", lambda d: ((d.normal(B, V), 4), {}), differentiable=(0,))
case(
    "top_k[per-row]",
    lambda d: ((d.normal(B, V), _per_row(1, 4, 99, dtype=np.int32)), {}),
    differentiable=(0,),
)
case("top_p", lambda d: ((d.normal(B, V, scale=2.0), 0.8), {}), differentiable=(0,))
case(
    "top_p[per-row]",
    lambda d: ((d.normal(B, V), _per_row(0.1, 0.8, 1.0)), {}),
    differentiable=(0,),
)
case("min_p", lambda d: ((d.normal(B, V, scale=2.0), 0.1), {}), differentiable=(0,))
case(
    "min_p[per-row]",
    lambda d: ((d.normal(B, V), _per_row(0.0, 0.2, 1.0)), {}),
    differentiable=(0,),
)
case("repetition_penalty", lambda d: ((d.normal(B, V), d.allowed_tokens(B, V), 1.3), {}), differentiable=(0,))
case(
    "repetition_penalty[per-row]",
    lambda d: ((d.normal(B, V), d.allowed_tokens(B, V), _per_row(0.8, 1.0, 2.0)), {}),
    differentiable=(0,),
)
case(
    "sample",
    lambda d: ((int(d.rng.integers(2**31)), d.normal(B, V, scale=2.0)), {"top_k": 6, "top_p": 0.9, "min_p": 0.05}),
    random=True,
)
