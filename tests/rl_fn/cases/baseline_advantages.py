"""Cases of outcome advantages by other baselines; `valid` is the mask, `group_ids` makes groups ragged."""

from tests.rl_fn.cases.base import B, Draw, G, case


def _ids(d: Draw):
    return d.integers(2, B, G)


case("remax_advantages", lambda d: ((d.normal(B, G), d.normal(B)), {}), differentiable=(0, 1))
case(
    "remax_advantages[valid]",
    lambda d: ((d.normal(B, G), d.normal(B, G), d.mask(B, G)), {}),
    differentiable=(0, 1),
    mask=2,
)
case(
    "opo_advantages",
    lambda d: ((d.normal(B, G), d.integers(9, B, G), d.mask(B, G)), {}),
    differentiable=(0,),
    mask=2,
)
case(
    "opo_advantages[ragged]",
    lambda d: ((d.normal(B, G), d.positive(B, G), d.mask(B, G)), {"group_ids": _ids(d)}),
    differentiable=(0, 1),
    mask=2,
)
for _name, _variants in {
    "gpg_advantages": {
        "": {},
        "[nonzero]": {"alpha": "nonzero", "norm": 2.0},
        "[none]": {"alpha": "none"},
    },
    "maxrl_advantages": {"": {}},
    "leave_one_out_std_advantages": {"": {}},
}.items():
    for _key, _options in _variants.items():
        case(
            f"{_name}{_key}",
            lambda d, options=_options: ((d.uniform(0.1, 1.0, B, G), d.mask(B, G)), dict(options)),
            differentiable=(0,),
            mask=1,
        )
    case(
        f"{_name}[ragged]",
        lambda d: ((d.uniform(0.1, 1.0, B, G), d.mask(B, G)), {"group_ids": _ids(d)}),
        differentiable=(0,),
        mask=1,
    )
