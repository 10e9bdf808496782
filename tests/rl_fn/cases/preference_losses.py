"""Cases of losses on preferences: pairs, single completions, and reward models."""

from tests.rl_fn.cases.base import B, T, case

# Cases of losses of pairs and of single responses.


def _four(d):
    return d.logprobs(), d.logprobs(), d.logprobs(), d.logprobs()


def _with_reference(name, **kwargs):
    variant = name.split("[")[1][:-1] if "[" in name else ""
    assert bool(variant) == bool(kwargs), name
    case(name, lambda d: ((*_four(d), d.mask()), kwargs), differentiable=(0, 1, 2, 3), mask=4)


def _without_reference(name, **kwargs):
    case(name, lambda d: ((d.logprobs(), d.logprobs(), d.mask()), kwargs), differentiable=(0, 1), mask=2)


for _name in ("dpo", "dpo_robust", "f_dpo", "ipo", "hinge", "exo", "nca", "bco", "apo_zero", "apo_down", "discopop"):
    _with_reference(_name)
for _name in ("aot", "aot_unpaired"):
    _with_reference(_name)
    _with_reference(f"{_name}[smoothed]", beta=0.5, label_smoothing=0.2)
_with_reference("dpo[smoothed]", beta=0.7, label_smoothing=0.2)
_with_reference("dpo_robust[strong]", beta=0.7, label_smoothing=0.3)
_with_reference("exo[smoothed]", beta=0.7, label_smoothing=0.2)
_with_reference("ipo[weak]", beta=2.0)
_with_reference("hinge[narrow]", beta=2.0)
_with_reference("apo_zero[strong]", beta=2.0)
_with_reference("apo_down[strong]", beta=2.0)
_with_reference("nca[strong]", beta=2.0)
_with_reference("discopop[wide]", beta=0.7, tau=2.0)
_with_reference("discopop[strong]", beta=0.7, tau=0.3)
for _divergence in ("forward_kl", "js", "alpha"):
    _with_reference(f"f_dpo[{_divergence}]", divergence=_divergence, alpha=0.3, beta=0.2, label_smoothing=0.1)
_with_reference("sppo[fixed]", beta=0.5)
case(
    "sppo",
    lambda d: (
        (*_four(d), d.mask()),
        {"beta": 0.5, "chosen_win_rate": d.uniform(0, 1, B, 1), "rejected_win_rate": d.uniform(0, 1, B, 1)},
    ),
    differentiable=(0, 1, 2, 3),
    mask=4,
)
case(
    "bco[shift]",
    lambda d: ((*_four(d), d.mask()), {"beta": 0.7, "delta": d.normal(1).reshape(())}),
    differentiable=(0, 1, 2, 3),
    mask=4,
)
case(
    "dpo_norm",
    lambda d: (
        (*_four(d), d.integers(9, B, T).astype("float32"), d.integers(9, B, T, low=1).astype("float32"), d.mask()),
        {"label_smoothing": 0.1},
    ),
    differentiable=(0, 1, 2, 3),
    mask=6,
    masked=(0, 1, 2, 3, 4, 5),
)
case(
    "rpo",
    lambda d: ((*_four(d), d.integers(9, B, T).astype("float32"), d.mask()), {"alpha": 0.5, "label_smoothing": 0.1}),
    differentiable=(0, 1, 2, 3),
    mask=5,
    masked=(0, 1, 2, 3, 4),
)
for _name in ("orpo", "simpo", "cpo"):
    _without_reference(_name)
_without_reference("orpo[strong]", lam=2.0)
_without_reference("simpo[strong]", beta=5.0, gamma=0.3)
_without_reference("cpo[smoothed]", beta=0.7, alpha=0.5, label_smoothing=0.2)
for _name, _kwargs in {"tpo": {}, "tpo[margin]": {"beta": 2.0, "alpha": 0.5, "gamma": 0.5}}.items():
    case(
        _name,
        lambda d, kwargs=_kwargs: ((d.logprobs(), d.logprobs(), d.logprobs(), d.mask()), kwargs),
        differentiable=(0, 1, 2),
        mask=3,
    )
case(
    "kto",
    lambda d: (
        (d.logprobs(), d.logprobs(), d.allowed_tokens(B, T), d.positive(1).reshape(()), d.mask()),
        {"beta": 0.7, "desirable_weight": 1.5, "undesirable_weight": 0.5},
    ),
    differentiable=(0, 1),
    mask=4,
)
case("kto_kl", lambda d: ((d.logprobs(), d.logprobs(), d.mask()), {}), mask=2, masked=(0, 1))
case("wpo_weights", lambda d: ((d.logprobs(), d.mask()), {}), mask=1, masked=(0,))
case(
    "wpo_weights[aligned]",
    lambda d: ((d.logprobs(), d.mask()), {"sum_squared_probs": d.uniform(0.1, 1, B, T)}),
    mask=1,
    masked=(0,),
)

# Cases of reward-model losses and of metrics of pairs.

case("bradley_terry", lambda d: ((d.normal(), d.normal(), d.mask()), {}), differentiable=(0, 1), mask=2)
case(
    "bradley_terry[centred]",
    lambda d: ((d.normal(), d.normal(), d.mask()), {"margin": d.uniform(0, 2, B, 1), "center": 0.1}),
    differentiable=(0, 1),
    mask=2,
)
case("plackett_luce", lambda d: ((d.normal(scale=3.0), d.mask()), {}), differentiable=(0,), mask=1)
case(
    "preference_metrics",
    lambda d: ((d.logprobs(), d.logprobs(), d.logprobs(), d.logprobs(), d.mask()), {"beta": 0.3}),
    mask=4,
    masked=(0, 1, 2, 3),
)
