"""Cases of distillation."""

import numpy as np

from tests.oracle import surrogates
from tests.rl_fn.cases.base import B, V, case

K = 4


def _tokens(d):
    """K different ids a row."""
    return np.argsort(d.uniform(0, 1, B, V), axis=-1)[:, :K].astype(np.int32)


def _padded(d):
    """Ids of reports of which each second one has only K − 1 entries."""
    ids = _tokens(d)
    ids[::2, 1] = -1
    return ids


def _reported(d):
    """The K entries that a teacher would report: log-probabilities that leave something over."""
    logits = d.normal(B, V, scale=2.0)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logprobs[:, :K].astype(np.float32)


for _beta in (0.0, 0.5, 0.1, 1.0):
    case(
        f"gkd[{_beta}]",
        lambda d, beta=_beta: ((d.normal(B, V), d.normal(B, V), d.mask(B)), {"beta": beta, "temperature": 1.5}),
        differentiable=(0, 1),
        mask=2,
    )
case("gkd", lambda d: ((d.normal(B, V), d.normal(B, V)), {}), differentiable=(0, 1))
for _tail in ("bucket", "renormalise", "drop"):
    for _beta in (0.0, 0.3, 1.0):
        case(
            f"top_k_distillation[{_tail} {_beta}]",
            lambda d, tail=_tail, beta=_beta: (
                (d.normal(B, V), _reported(d), _tokens(d), d.mask(B)),
                {"tail": tail, "beta": beta, "temperature": 0.7},
            ),
            differentiable=(0,),
            mask=3,
            masked=(0, 1),
        )
    case(
        f"top_k_distillation[{_tail} padded]",
        lambda d, tail=_tail: ((d.normal(B, V), _reported(d), _padded(d)), {"tail": tail, "beta": 0.3}),
        differentiable=(0,),
    )
for _kwargs, _variant in (({}, ""), ({"clip": 0.5}, "[clipped]")):
    case(
        f"distillation_advantages{_variant}",
        lambda d, kwargs=_kwargs: ((d.logprobs(), d.logprobs(), d.mask()), kwargs),
        mask=2,
        masked=(0, 1),
    )
    case(
        f"on_policy_distillation{_variant}",
        lambda d, kwargs=_kwargs: ((d.logprobs(), d.logprobs(), d.mask()), kwargs),
        differentiable=(0,),
        mask=2,
        masked=(0, 1),
        surrogate=surrogates.on_policy_distillation,
    )
