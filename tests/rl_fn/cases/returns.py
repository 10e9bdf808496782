"""Cases of the recurrence, and of returns and advantages from a critic."""

from tests.rl_fn.cases.base import B, T, case

case(
    "linear_recurrence",
    lambda d: ((d.uniform(0.0, 1.0, B, T), d.normal(), d.mask()), {"init": 0.5}),
    differentiable=(0, 1),
    mask=2,
)
case(
    "linear_recurrence[packed]",
    lambda d: ((d.uniform(0.0, 1.0, B), d.normal(), d.mask()), {"segment_ids": d.segments()}),
    differentiable=(1,),
    mask=2,
)
case("discounted_returns", lambda d: ((d.normal(), d.mask()), {"gamma": 0.9}), differentiable=(0,), mask=1)
case(
    "discounted_returns[packed]",
    lambda d: ((d.normal(), d.mask()), {"gamma": 0.9, "segment_ids": d.segments()}),
    differentiable=(0,),
    mask=1,
)
for _name in ("gae", "td_lambda"):
    case(
        _name,
        lambda d: ((d.normal(), d.normal(), d.mask()), {"gamma": 0.97, "lam": 0.9, "bootstrap": 0.3}),
        differentiable=(0, 1),
        mask=2,
    )
    case(
        f"{_name}[per-row]",
        lambda d: (
            (d.normal(), d.normal(), d.mask()),
            {"gamma": 0.97, "lam": d.uniform(0.0, 1.0, B), "bootstrap": d.normal(B)},
        ),
        differentiable=(0, 1),
        mask=2,
    )
    case(
        f"{_name}[packed]",
        lambda d: ((d.normal(), d.normal(), d.mask()), {"gamma": 0.97, "lam": 0.9, "segment_ids": d.segments()}),
        differentiable=(0, 1),
        mask=2,
    )
case("length_adaptive_lambda", lambda d: ((d.integers(4000, B, low=1),), {}))
case("length_adaptive_lambda[bounded]", lambda d: ((d.integers(50, B),), {"alpha": 0.1, "minimum": 0.0}))
case("whiten", lambda d: ((d.normal(scale=3.0), d.mask()), {}), differentiable=(0,), mask=1)
case("whiten[keep-mean]", lambda d: ((d.normal(), d.mask()), {"shift_mean": False}), differentiable=(0,), mask=1)
