"""Cases of Clip-Cov, KL-Cov and the mask of high-entropy tokens; the draw of Clip-Cov is an argument."""

from tests.rl_fn.cases.base import B, T, case

for _key, _options in {
    "clip_cov": {"cov_low": -1.0},
    "clip_cov[fraction]": {"fraction": 0.25, "cov_low": -0.5, "clip_low": 2.0, "clip_high": 9.0},
}.items():
    case(
        _key,
        lambda d, options=_options: (
            (d.logprobs(), d.logprobs(), d.normal(), d.mask(), d.uniform(0.0, 1.0, B, T)),
            dict(options),
        ),
        differentiable=(0,),
        mask=3,
        masked=(0, 1, 2, 4),
    )
for _key, _options in {
    "clip_cov[largest]": {"fraction": 0.25, "cov_low": 0.0},
    "kl_cov": {},
    "kl_cov[fraction]": {"fraction": 0.5, "coef": 0.3},
}.items():
    case(
        _key,
        lambda d, options=_options: ((d.logprobs(), d.logprobs(), d.normal(), d.mask()), dict(options)),
        differentiable=(0,),
        mask=3,
        masked=(0, 1, 2),
    )
for _key, _options in {"high_entropy_mask": {}, "high_entropy_mask[half]": {"quantile": 0.5}}.items():
    case(_key, lambda d, options=_options: ((d.positive(), d.mask()), dict(options)), mask=1, masked=(0,))
