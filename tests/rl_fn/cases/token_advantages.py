"""Cases of the optimal token baseline and of GiGPO's advantages."""

import numpy as np

from tests.rl_fn.cases.base import B, Draw, G, T, case


def _tokens(d: Draw):
    logprobs = d.logprobs(B, G, T)
    squares = np.exp(2 * logprobs)
    return d.normal(B, G, T), logprobs, (squares + d.uniform(0.0, 1.0, B, G, T) * (1 - squares)), d.mask(B, G, T)


for _key, _options in {
    "optimal_token_baseline_advantages": {},
    "optimal_token_baseline_advantages[gamma]": {"gamma": 0.9},
}.items():
    case(
        _key,
        lambda d, options=_options: (_tokens(d), dict(options)),
        differentiable=(0,),
        mask=3,
        masked=(0, 1, 2),
    )
for _key, _options in {
    "step_group_advantages": {},
    "step_group_advantages[none]": {"scale": "none", "gamma": 0.9, "weight": 0.5},
}.items():
    case(
        _key,
        lambda d, options=_options: ((d.normal(B, G, 5), d.integers(3, B, G, 5), d.mask(B, G, 5)), dict(options)),
        differentiable=(0,),
        mask=2,
    )
case(
    "optimal_token_baseline_advantages[ragged]",
    lambda d: ((*_tokens(d), d.mask(B, G)), {"group_ids": d.integers(2, B, G)}),
    differentiable=(0,),
    mask=3,
    masked=(0, 1, 2),
)
case(
    "step_group_advantages[ragged]",
    lambda d: (
        (d.normal(B, G, 5), d.integers(2, B, G, 5), d.mask(B, G, 5), d.mask(B, G)),
        {"group_ids": d.integers(2, B, G)},
    ),
    differentiable=(0,),
    mask=2,
)
