"""Cases of KL estimators and exact divergences."""

from tests.oracle import surrogates
from tests.rl_fn.cases.base import B, V, case

for _name in ("kl_k1", "kl_k2", "kl_k3", "kl_abs"):
    case(_name, lambda d: ((d.logprobs(), d.logprobs(), d.mask()), {}), differentiable=(0, 1), mask=2)
case(
    "kl_k3[close]",
    lambda d: ((x := d.logprobs(), x + d.normal(scale=1e-2), d.mask()), {}),
    differentiable=(0, 1),
    mask=2,
)
case(
    "kl_straight_through",
    lambda d: ((d.normal(), d.normal()), {}),
    differentiable=(0, 1),
    surrogate=surrogates.kl_straight_through,
)
case("kl_categorical", lambda d: ((d.normal(B, V), d.normal(B, V)), {}), differentiable=(0, 1))
case("entropy", lambda d: ((d.normal(B, V),), {}), differentiable=(0,))
