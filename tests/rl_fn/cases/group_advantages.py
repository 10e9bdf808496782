"""Cases of advantages from a group; `valid` is the mask of a group."""

from tests.rl_fn.cases.base import B, G, case

for _scale in ("group", "batch", "none"):
    case(
        f"grpo_advantages[{_scale}]",
        lambda d, scale=_scale: ((d.normal(B, G), d.mask(B, G)), {"scale": scale}),
        differentiable=(0,),
        mask=1,
    )
case("grpo_advantages", lambda d: ((d.normal(B, G),), {}), differentiable=(0,))
case("rloo_advantages", lambda d: ((d.normal(B, G),), {}), differentiable=(0,))
case("rloo_advantages[valid]", lambda d: ((d.normal(B, G), d.mask(B, G)), {}), differentiable=(0,), mask=1)
for _name in ("grpo_advantages", "rloo_advantages"):
    case(
        f"{_name}[ragged]",
        lambda d: ((d.normal(B, G), d.mask(B, G)), {"group_ids": d.integers(2, B, G)}),
        differentiable=(0,),
        mask=1,
    )
case(
    "grpo_advantages[ragged, batch]",
    lambda d: ((d.normal(B, G), d.mask(B, G)), {"group_ids": d.integers(2, B, G), "scale": "batch"}),
    differentiable=(0,),
    mask=1,
)
