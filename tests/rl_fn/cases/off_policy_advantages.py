"""Cases of off-policy advantages and n-step returns."""

from tests.rl_fn.cases.base import B, case

_OPTIONS = {
    "vtrace": {"gamma": 0.97, "rho_clip": 1.5, "c_clip": 1.1, "lam": 0.9, "bootstrap": 0.3},
    "retrace": {"gamma": 0.97, "lam": 0.9, "c_clip": 1.1, "bootstrap": 0.3},
    "clipped_importance_advantages": {"gamma": 0.97, "clip_low": 0.3, "clip_high": 0.4},
}
for _name, _options in _OPTIONS.items():
    case(
        _name,
        lambda d, options=_options: ((d.normal(), d.normal(), d.normal(), d.mask()), dict(options)),
        differentiable=(0, 1),
        mask=3,
        masked=(0, 1, 2),
    )
    case(
        f"{_name}[packed]",
        lambda d, options=_options: (
            (d.normal(), d.normal(), d.normal(), d.mask()),
            {**options, "segment_ids": d.segments()},
        ),
        differentiable=(0, 1),
        mask=3,
        masked=(0, 1, 2),
    )
case(
    "vtrace[one_scan]",
    lambda d: (
        (d.normal(), d.normal(), d.normal(), d.mask()),
        {"gamma": 0.97, "bootstrap": d.normal(B), "segment_ids": d.segments()},
    ),
    differentiable=(0, 1),
    mask=3,
    masked=(0, 1, 2),
)
for _n in (1, 3, 100):
    case(
        f"n_step[{_n}]",
        lambda d, n=_n: ((d.normal(), d.normal(), d.mask()), {"n": n, "gamma": 0.9, "bootstrap": 0.3}),
        differentiable=(0, 1),
        mask=2,
    )
case(
    "n_step",
    lambda d: (
        (d.normal(), d.normal(), d.mask()),
        {"n": 2, "gamma": 0.9, "bootstrap": d.normal(B), "segment_ids": d.segments()},
    ),
    differentiable=(0, 1),
    mask=2,
)
