"""Cases of importance weights and off-policy corrections."""

from tests.rl_fn.cases.base import case

for _level in ("token", "sequence", "sequence_sum"):
    case(
        f"log_ratio[{_level}]",
        lambda d, level=_level: ((d.logprobs(), d.logprobs(), d.mask()), {"level": level}),
        differentiable=(0, 1),
        mask=2,
    )
    case(
        f"truncated_importance_weights[{_level}]",
        lambda d, level=_level: ((d.normal(), d.mask()), {"cap": 1.5, "level": level}),
        mask=1,
        masked=(0,),
    )
    case(
        f"masked_importance_weights[{_level}]",
        lambda d, level=_level: ((d.normal(), d.mask()), {"low": 0.4, "high": 3.0, "level": level}),
        mask=1,
        masked=(0,),
    )
case(
    "log_ratio[packed]",
    lambda d: ((d.logprobs(), d.logprobs(), d.mask()), {"level": "sequence", "segment_ids": d.segments()}),
    differentiable=(0, 1),
    mask=2,
)
case("effective_sample_size", lambda d: ((d.positive(), d.mask()), {}), differentiable=(0,), mask=1)
case("mismatch_metrics", lambda d: ((d.logprobs(), d.logprobs(), d.mask()), {}), mask=2, masked=(0, 1))
case(
    "mismatch_metrics[packed]",
    lambda d: ((d.logprobs(), d.logprobs(), d.mask()), {"segment_ids": d.segments()}),
    mask=2,
    masked=(0, 1),
)
