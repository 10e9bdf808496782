"""Options at values of their own, where the families' cases leave them as they are (test_keywords.py asks for each)."""

import numpy as np

from tests.oracle import surrogates
from tests.rl_fn.cases.base import B, Draw, G, T, V, case

for _name in ("aggregate", "aggregate_parts"):
    case(
        f"{_name}[norm, other length]",
        lambda d: ((d.normal(), d.mask(), "seq-mean-token-sum-norm"), {"max_completion_length": 9}),
        differentiable=(0,),
        mask=1,
    )
for _mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
    case(
        f"aggregate_parts[{_mode}, packed]",
        lambda d, mode=_mode: (
            (d.normal(), d.mask(), mode),
            {"segment_ids": d.segments(), **({"max_completion_length": 16} if mode.endswith("norm") else {})},
        ),
        differentiable=(0,),
        mask=1,
    )
for _name, _options in {"masked_var": {"ddof": 0}, "whiten": {"eps": 0.5}}.items():
    case(
        f"{_name}[{next(iter(_options))}]",
        lambda d, options=_options: ((d.normal(), d.mask()), dict(options)),
        differentiable=(0,),
        mask=1,
    )

# Policies that have drifted less than the families' draws, so that a bound lies inside the ratios.
_FOUR = {"differentiable": (0,), "mask": 3, "masked": (0, 1, 2)}


def _near(d: Draw):
    old = d.logprobs()
    return np.minimum(old + d.normal(scale=0.5), -1e-3), old, d.normal(), d.mask()


def _far(d: Draw):
    """Sequence ratios well above a dual clip."""
    new = d.logprobs()
    return new, new - d.positive() - 1.0, d.normal(), d.mask()


for _name in ("gspo", "gspo_token", "luspo"):
    for _packed in (False, True):
        case(
            f"{_name}[dual{', packed' if _packed else ''}]",
            lambda d, packed=_packed: (
                _far(d),
                {
                    "clip_low": 0.3,
                    "clip_high": 0.4,
                    "dual_clip": 2.5,
                    **({"segment_ids": d.segments()} if packed else {}),
                },
            ),
            surrogate=surrogates.gspo_token if _name == "gspo_token" else None,
            **_FOUR,
        )
for _key, _options in {
    "gmpo[narrow]": {"clip_low": 0.1, "clip_high": 0.2},
    "vespo[negative]": {"k_pos": 0.5, "lambda_pos": 0.7, "k_neg": 0.4, "lambda_neg": 0.6},
    "dro[sequence]": {"beta": 0.5, "level": "sequence_sum"},
    "kimi[token]": {"tau": 0.6, "level": "token"},
    "topr[token]": {"level": "token"},
    "topr[sequence]": {"level": "sequence"},
}.items():
    _name = _key.split("[")[0]
    for _packed in (False, True):
        case(
            f"{_key[:-1]}, packed]" if _packed else _key,
            lambda d, options=_options, packed=_packed: (
                _near(d),
                {**options, **({"segment_ids": d.segments()} if packed else {})},
            ),
            surrogate={"vespo": surrogates.vespo, "topr": surrogates.topr}.get(_name),
            **_FOUR,
        )
for _key, _options in {
    "clip_cov[band]": {"fraction": 0.4, "cov_low": -0.3, "cov_high": 0.2},
    "kl_cov[all]": {"fraction": 1.0, "coef": 2.0},
}.items():
    case(_key, lambda d, options=_options: (_near(d), dict(options)), **_FOUR)
case("clipped_tokens[low]", lambda d: (_near(d), {"clip_low": 0.05, "clip_high": 9.0}), mask=3, masked=(0, 1, 2))
case(
    "value_huber[wide]",
    lambda d: ((d.normal(), d.normal(), d.mask()), {"delta": 0.3}),
    differentiable=(0,),
    mask=2,
    masked=(0, 1),
)


def _pairs(d: Draw):
    return d.logprobs(), d.logprobs(), d.logprobs(), d.logprobs()


def _lengths(d: Draw):
    return d.integers(9, B, T, low=1).astype(np.float32)


case(
    "dpo_norm[strong]",
    lambda d: ((*_pairs(d), _lengths(d), _lengths(d), d.mask()), {"beta": 0.6}),
    differentiable=(0, 1, 2, 3),
    mask=6,
    masked=(0, 1, 2, 3, 4, 5),
)
case(
    "rpo[strong]",
    lambda d: ((*_pairs(d), _lengths(d), d.mask()), {"beta": 0.6, "alpha": 0.2}),
    differentiable=(0, 1, 2, 3),
    mask=5,
    masked=(0, 1, 2, 3, 4),
)


# Importance weights and masks against drift.
for _level in ("token", "sequence", "sequence_sum"):
    case(
        f"truncated_importance_weights[{_level}, packed]",
        lambda d, level=_level: ((d.normal(), d.mask()), {"cap": 0.9, "level": level, "segment_ids": d.segments()}),
        mask=1,
        masked=(0,),
    )
    case(
        f"masked_importance_weights[{_level}, packed]",
        lambda d, level=_level: (
            (d.normal(), d.mask()),
            {"low": 0.7, "high": 1.6, "level": level, "segment_ids": d.segments()},
        ),
        mask=1,
        masked=(0,),
    )
    case(
        f"log_ratio[{_level}, packed]",
        lambda d, level=_level: ((d.logprobs(), d.logprobs(), d.mask()), {"level": level, "segment_ids": d.segments()}),
        differentiable=(0, 1),
        mask=2,
    )
for _level in ("seq_sum", "seq_mean", "seq_max"):
    case(
        f"rejection_mask[{_level}, packed]",
        lambda d, level=_level: (
            (d.normal(), d.mask()),
            {"level": level, "threshold": 1.1, "segment_ids": d.segments()},
        ),
        mask=1,
        masked=(0,),
    )
case("second_moment_mask[wide]", lambda d: ((d.normal(), d.mask()), {"threshold": 0.1}), mask=1, masked=(0,))
for _name in ("off_policy_sequence_mask", "total_variation_mask"):
    case(
        f"{_name}[narrow]",
        lambda d: ((d.normal(), d.logprobs(), d.logprobs(), d.mask()), {"threshold": 0.05}),
        mask=3,
        masked=(0, 1, 2),
    )

# Advantages with an ε that shows.
for _scale in ("group", "batch"):
    case(
        f"grpo_advantages[{_scale}, eps]",
        lambda d, scale=_scale: ((d.normal(B, G), d.mask(B, G)), {"scale": scale, "eps": 0.3}),
        differentiable=(0,),
        mask=1,
    )
case("gdpo_advantages[eps]", lambda d: ((d.normal(B, 2, G), d.positive(2)), {"eps": 0.3}), differentiable=(0, 1))
case(
    "step_group_advantages[eps]",
    lambda d: ((d.normal(B, G, 5), d.integers(3, B, G, 5), d.mask(B, G, 5)), {"eps": 0.3}),
    differentiable=(0,),
    mask=2,
)
case("reinforce_pp_advantages[eps]", lambda d: ((d.normal(), d.mask()), {"eps": 0.3}), differentiable=(0,), mask=1)
case(
    "reinforce_pp_baseline_advantages[eps]",
    lambda d: ((d.normal(B, G), d.mask(B, G, T)), {"eps": 0.3}),
    differentiable=(0,),
)

case(
    "maxrl_advantages[negative]",
    lambda d: ((d.uniform(-1.0, -0.1, B, G), d.mask(B, G)), {}),
    differentiable=(0,),
    mask=1,
)

case("overlong_penalty[shorter]", lambda d: ((d.integers(30, B, G),), {"max_length": 12, "buffer": 8}))
case(
    "group_filter[high]",
    lambda d: ((d.uniform(0.0, 1.0, B, G), d.mask(B, G)), {"high": 0.5}),
    mask=1,
    masked=(0,),
)

# Scores of several objectives, all the larger the better or the smaller.
for _key, _up in {"up": True, "down": False}.items():
    case(
        f"weighted_sum[{_key}]",
        lambda d, up=_up: ((d.normal(B, 3), d.uniform(0, 2, 3)), {"maximize": up}),
        differentiable=(0, 1),
    )
    case(
        f"tchebycheff[{_key}]",
        lambda d, up=_up: ((d.normal(B, 3), d.uniform(0.1, 2, 3), d.normal(3)), {"maximize": up, "rho": 0.3}),
        differentiable=(0, 1, 2),
    )

# Rounding: quotients half-way between two codes, on both sides of zero and at both ends of the range.
_FP8_HALVES = np.array([17.0, 19.0, 21.0, 34.0, 38.0, 136.0, 152.0, 0.0205078125], np.float32)


def _int8_halves(d: Draw):
    weight = d.integers(255, 5, 12, low=-127).astype(np.float32) + np.float32(0.5)
    weight[:, 0] = np.array([127.5, -127.5, 127.5, -127.5, 127.5], np.float32)
    return (weight,)


def _fp8_halves(d: Draw):
    weight = _FP8_HALVES[d.integers(len(_FP8_HALVES), 5, 12)] * np.where(d.mask(5, 12), 1, -1).astype(np.float32)
    weight[:, 0] = np.float32(448.0)
    return (weight,)


for _axis in (-1, 0, None):
    case(f"quantize_int8[ties, {_axis}]", lambda d, axis=_axis: (_int8_halves(d), {"axis": axis}))
case("quantize_int8[ties, 127]", lambda d: ((_int8_halves(d)[0] - np.float32(0.5),), {"half_range": 127.0}))
for _granularity in ("channel", "tensor", "block"):
    case(
        f"quantize_fp8[ties, {_granularity}]",
        lambda d, granularity=_granularity: (_fp8_halves(d), {"granularity": granularity, "block": 4}),
    )
case("quantize_fp8[block of two]", lambda d: ((d.normal(5, 12),), {"granularity": "block", "block": 2}))
case(
    "dequantize[block of two]",
    lambda d: ((d.integers(128, 5, 12, low=-128), d.uniform(0.1, 1, 3, 6)), {"block": 2}),
    differentiable=(1,),
)

case(
    "row_state[options]",
    lambda d: (
        (d.normal(B, V, scale=3.0), np.zeros(B, np.int32)),
        {"temperature": 0.7, "softcap": 4.0, "allowed_tokens": d.allowed_tokens(B, V)},
    ),
)
for _key, _options in {
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.0},
    "few": {"top_k": 2},
    "nucleus": {"top_p": 0.4},
    "min_p": {"min_p": 0.4},
}.items():
    case(
        f"sample[{_key}]",
        lambda d, options=_options: ((int(d.rng.integers(2**31)), d.normal(B, V, scale=2.0)), dict(options)),
        random=True,
    )
