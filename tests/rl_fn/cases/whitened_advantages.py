"""Cases of advantages normalised over the batch.

The mask of a case has the shape of what it masks in the tables of the laws. Where rewards have fewer or more dimensions
than the mask, one case has the gradient and another the mask; test_whitened_advantages.py masks both.
"""

from tests.rl_fn.cases.base import B, G, T, case

for _key, _options in {
    "reinforce_pp_advantages": {},
    "reinforce_pp_advantages[gamma]": {"gamma": 0.9},
    "reinforce_pp_advantages[packed]": {"gamma": 0.9, "segment_ids": True},
}.items():
    case(
        _key,
        lambda d, options=_options: (
            (d.normal(), d.mask()),
            {**options, "segment_ids": d.segments()} if "segment_ids" in options else dict(options),
        ),
        differentiable=(0,),
        mask=1,
    )
for _key in ("", "[ragged]"):
    case(
        f"reinforce_pp_baseline_advantages{_key}",
        lambda d, ragged=bool(_key): (
            (d.normal(B, G), d.mask(B, G, T)),
            {"group_ids": d.integers(2, B, G)} if ragged else {},
        ),
        differentiable=(0,),
    )
    case(
        f"gdpo_advantages{_key}",
        lambda d, ragged=bool(_key): (
            (d.normal(B, 2, G), d.positive(2), d.mask(B, G)),
            {"group_ids": d.integers(2, B, G)} if ragged else {},
        ),
        differentiable=(0, 1),
    )
case("reinforce_pp_baseline_advantages[mask]", lambda d: ((d.normal(B, G), d.mask(B, G, T)), {}), mask=1)
case("gdpo_advantages[mask]", lambda d: ((d.normal(B, 2, G), d.positive(2), d.mask(B, G)), {}), mask=2)
case("gdpo_advantages[equal weights]", lambda d: ((d.normal(B, 2, G),), {}), differentiable=(0,))
case(
    "reinforce_pp_baseline_advantages[valid]",
    lambda d: ((d.normal(B, G), d.mask(B, G, T), d.mask(B, G)), {}),
    differentiable=(0,),
)
