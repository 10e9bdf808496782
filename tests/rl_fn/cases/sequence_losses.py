"""Cases of policy losses of sequences, padded and packed."""

from tests.oracle import surrogates
from tests.rl_fn.cases.base import case

_STOPPED = {"gspo_token": surrogates.gspo_token, "vespo": surrogates.vespo, "topr": surrogates.topr}
_WIDE = {"clip_low": 0.3, "clip_high": 0.4}
for _name, _options in {
    "gspo": _WIDE,
    "gspo_token": _WIDE,
    "luspo": _WIDE,
    "gmpo": {},
    "vespo": {"k_pos": 1.5},
    "dro": {"beta": 0.3},
    "kimi": {"tau": 0.3, "level": "sequence_sum"},
    "topr": {},
}.items():
    for _packed in (False, True):
        case(
            f"{_name}[packed]" if _packed else _name,
            lambda d, options=_options, packed=_packed: (
                (d.logprobs(), d.logprobs(), d.normal(), d.mask()),
                {**options, **({"segment_ids": d.segments()} if packed else {})},
            ),
            differentiable=(0,),
            mask=3,
            masked=(0, 1, 2),
            surrogate=_STOPPED.get(_name),
        )
