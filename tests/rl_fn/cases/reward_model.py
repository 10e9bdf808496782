"""Cases of reward-model losses and of metrics of pairs."""

from tests.rl_fn.cases.base import B, case

case("bradley_terry", lambda d: ((d.normal(), d.normal(), d.mask()), {}), differentiable=(0, 1), mask=2)
case(
    "bradley_terry[centred]",
    lambda d: ((d.normal(), d.normal(), d.mask()), {"margin": d.uniform(0, 2, B, 1), "center": 0.1}),
    differentiable=(0, 1),
    mask=2,
)
case("plackett_luce", lambda d: ((d.normal(scale=3.0), d.mask()), {}), differentiable=(0,), mask=1)
case(
    "preference_metrics",
    lambda d: ((d.logprobs(), d.logprobs(), d.logprobs(), d.logprobs(), d.mask()), {"beta": 0.3}),
    mask=4,
    masked=(0, 1, 2, 3),
)
