"""Cases of the group filter and the overlong penalty."""

from tests.rl_fn.cases.base import B, G, case

for _key, _options in {"group_filter": {}, "group_filter[bounds]": {"low": 0.3, "high": 0.7}}.items():
    case(
        _key,
        lambda d, options=_options: ((d.integers(2, B, G).astype("float32"), d.mask(B, G)), dict(options)),
        mask=1,
        masked=(0,),
    )
case(
    "group_filter[ragged]",
    lambda d: ((d.integers(2, B, G).astype("float32"), d.mask(B, G)), {"group_ids": d.integers(2, B, G)}),
    mask=1,
    masked=(0,),
)
case("overlong_penalty", lambda d: ((d.integers(30, B, G),), {"max_length": 20, "buffer": 8}))
case("overlong_penalty[step]", lambda d: ((d.integers(30, B, G),), {"max_length": 20, "buffer": 0}))
case("overlong_penalty[real]", lambda d: ((d.uniform(0.0, 30.0, B, G),), {"max_length": 20, "buffer": 20}))
