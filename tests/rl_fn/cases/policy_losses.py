"""Cases of policy and value losses."""

from tests.rl_fn.cases.base import case

case("reinforce", lambda d: ((d.logprobs(), d.normal(), d.mask()), {}), differentiable=(0,), mask=2, masked=(0, 1))
for _name in ("ppo_clip", "clipped_tokens"):
    _gradient = (0,) if _name == "ppo_clip" else ()
    case(
        _name,
        lambda d: ((d.logprobs(), d.logprobs(), d.normal(), d.mask()), {}),
        differentiable=_gradient,
        mask=3,
        masked=(0, 1, 2),
    )
    case(
        f"{_name}[dual]",
        lambda d: (
            (d.logprobs(), d.logprobs(), d.normal(), d.mask()),
            {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 3.0},
        ),
        differentiable=_gradient,
        mask=3,
        masked=(0, 1, 2),
    )
case("entropy_bonus", lambda d: ((d.positive(), d.mask()), {}), differentiable=(0,), mask=1)
case("value_loss", lambda d: ((d.normal(), d.normal(), d.mask()), {}), differentiable=(0,), mask=2, masked=(0, 1))
case("value_huber", lambda d: ((d.normal(), d.normal(), d.mask()), {}), differentiable=(0,), mask=2, masked=(0, 1))
case(
    "value_clip",
    lambda d: ((d.normal(), d.normal(), d.normal(), d.mask()), {"clip": 0.2}),
    differentiable=(0,),
    mask=3,
    masked=(0, 1, 2),
)
