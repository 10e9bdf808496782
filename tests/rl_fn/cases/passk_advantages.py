"""Cases of advantages for pass@k."""

from tests.rl_fn.cases.base import B, G, case

# A group of two has the same advantage whatever its rewards: with a small eps its gradient is a difference of large
# numbers, and what a comparison of two programs would see is their rounding.
for _name, _variants in {
    "passk_advantages": {"": {}, "[unscaled]": {"scale": False}, "[ragged]": {"eps": 0.1}},
    "passk_analytic_advantages": {"": {"k": 2}, "[1]": {"k": 1}, "[3]": {"k": 3}, "[ragged]": {"k": 2}},
}.items():
    for _key, _options in _variants.items():
        case(
            f"{_name}{_key}",
            lambda d, options=_options, ragged=_key == "[ragged]": (
                (d.normal(B, 2 * G), d.mask(B, 2 * G)),
                {**options, **({"group_ids": d.integers(2, B, 2 * G)} if ragged else {})},
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
