"""Cases of exact divergences."""

from tests.rl_fn.cases.base import B, V, case

for _name in ("reverse_kl", "forward_kl", "jensen_shannon", "total_variation"):
    case(_name, lambda d: ((d.normal(B, V, scale=2.0), d.normal(B, V, scale=2.0)), {}), differentiable=(0, 1))
case("jensen_shannon[beta]", lambda d: ((d.normal(B, V), d.normal(B, V)), {"beta": 0.1}), differentiable=(0, 1))
for _key, _options in {"": {}, "[clip]": {"log_clip": 1.5}}.items():
    case(
        f"kl_importance_corrected{_key}",
        lambda d, options=_options: ((d.logprobs(), d.logprobs(), d.logprobs(), d.mask()), dict(options)),
        differentiable=(0, 1, 2),
        mask=3,
    )
