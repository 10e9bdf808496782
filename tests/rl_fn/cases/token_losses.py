"""Cases of policy losses of single tokens."""

from tests.oracle import surrogates
from tests.rl_fn.cases.base import case

case("gpg_loss", lambda d: ((d.logprobs(), d.normal(), d.mask()), {}), differentiable=(0,), mask=2, masked=(0, 1))
for _key, _options in {
    "decoupled_ppo": {},
    "decoupled_ppo[caps]": {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 3.0, "weight_cap": 1.2},
}.items():
    case(
        _key,
        lambda d, options=_options: (
            (d.logprobs(), d.logprobs(), d.logprobs(), d.normal(), d.mask()),
            dict(options),
        ),
        differentiable=(0,),
        mask=4,
        masked=(0, 1, 2, 3),
    )
for _key, _options in {
    "sapo": {},
    "sapo[tau]": {"tau_pos": 0.5, "tau_neg": 2.0},
    "dppo[tv]": {"threshold": 0.1},
    "dppo[kl]": {"threshold": 0.05, "divergence": "kl"},
    "dppo[cap]": {"threshold": 0.1, "ratio_cap": 1.5},
}.items():
    case(
        _key,
        lambda d, options=_options: ((d.logprobs(), d.logprobs(), d.normal(), d.mask()), dict(options)),
        differentiable=(0,),
        mask=3,
        masked=(0, 1, 2),
        surrogate=surrogates.dppo if "cap" in _key else None,
    )
for _key, _options in {"cispo": {"clip_high": 0.5}, "cispo[low]": {"clip_high": 0.2, "clip_low": 0.2}}.items():
    case(
        _key,
        lambda d, options=_options: ((d.logprobs(), d.logprobs(), d.normal(), d.mask()), dict(options)),
        differentiable=(0,),
        mask=3,
        masked=(0, 1, 2),
        surrogate=surrogates.cispo,
    )
