"""Cases of scalarisations, fronts and crowding."""

from tests.rl_fn.cases.base import B, case

M, N = 3, 8
MIXED = (True, False, True)

case("weighted_sum", lambda d: ((d.normal(B, M), d.uniform(0, 2, M)), {"maximize": MIXED}), differentiable=(0, 1))
case(
    "tchebycheff",
    lambda d: ((d.normal(B, M), d.uniform(0.1, 2, M), d.normal(M)), {"maximize": MIXED, "rho": 0.1}),
    differentiable=(0, 1, 2),
)
case("pareto_mask", lambda d: ((d.normal(B, N, M),), {"maximize": MIXED}))
case("pareto_mask[ties]", lambda d: ((d.integers(3, B, N, M).astype("float32"),), {"maximize": False}))
case("crowding_distance", lambda d: ((d.normal(B, N, M),), {}), differentiable=(0,))
case("crowding_distance[ties]", lambda d: ((d.integers(3, B, N, M).astype("float32"),), {}))
