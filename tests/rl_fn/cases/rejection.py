"""Cases of masks against drift."""

from tests.rl_fn.cases.base import case

for _statistic in ("k1", "k2", "k3"):
    for _level in ("token", "seq_sum", "seq_mean", "seq_max"):
        case(
            f"rejection_mask[{_statistic}, {_level}]",
            lambda d, statistic=_statistic, level=_level: (
                (d.normal(), d.mask()),
                {"statistic": statistic, "level": level, "threshold": 0.6},
            ),
            mask=1,
            masked=(0,),
        )
case("second_moment_mask", lambda d: ((d.normal(), d.mask()), {"threshold": 0.4}), mask=1, masked=(0,))
for _key in ("", "[packed]"):
    case(
        f"rejection_mask{_key or '[one]'}",
        lambda d, packed=bool(_key): (
            (d.normal(), d.mask()),
            {"level": "seq_mean", "threshold": 0.4, **({"segment_ids": d.segments()} if packed else {})},
        ),
        mask=1,
        masked=(0,),
    )
    for _name in ("off_policy_sequence_mask", "total_variation_mask"):
        case(
            f"{_name}{_key}",
            lambda d, packed=bool(_key): (
                (d.normal(), d.logprobs(), d.logprobs(), d.mask()),
                {"threshold": 0.3, **({"segment_ids": d.segments()} if packed else {})},
            ),
            mask=3,
            masked=(0, 1, 2),
        )
