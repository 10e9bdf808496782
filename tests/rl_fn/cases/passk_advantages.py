"""Cases of advantages for pass@k."""

from tests.rl_fn.cases.base import B, G, case

for _name, _variants in {
    "passk_advantages": {"": {}, "[unscaled]": {"scale": False}},
    "passk_analytic_advantages": {"": {"k": 2}, "[1]": {"k": 1}, "[3]": {"k": 3}},
}.items():
    for _key, _options in _variants.items():
        case(
            f"{_name}{_key}",
            lambda d, options=_options: ((d.normal(B, G), d.mask(B, G)), dict(options)),
            differentiable=(0,),
            mask=1,
        )
    case(
        f"{_name}[ragged]",
        lambda d, options=_variants[""]: (
            (d.normal(B, 2 * G), d.mask(B, 2 * G)),
            {**options, "group_ids": d.integers(2, B, 2 * G)},
        ),
        differentiable=(0,),
        mask=1,
    )
case(
    "passk_analytic_advantages[binary]",
    lambda d: ((d.integers(2, B, 6).astype("float32"), d.mask(B, 6)), {"k": 3}),
    mask=1,
    masked=(0,),
)
case("pass_at_k", lambda d: ((d.integers(4, B), d.integers(7, B, low=3), 3), {}))
