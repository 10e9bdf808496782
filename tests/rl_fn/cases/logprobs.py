"""Cases of log-probabilities."""

import numpy as np

import rl_fn
from tests.rl_fn.cases.base import B, Draw, T, V, case

case("logits_logprobs", lambda d: ((d.normal(B, T, V, scale=3.0), d.integers(V, B, T)), {}), differentiable=(0,))
case(
    "logits_logprobs[options]",
    lambda d: (
        (d.normal(B, T, V, scale=3.0), d.integers(V, B, T)),
        {"temperature": d.uniform(0.5, 2.0, B, T), "softcap": 5.0, "allowed_tokens": np.arange(V) != V},
    ),
    differentiable=(0,),
)
case(
    "logits_logprobs[allowed_tokens]",
    lambda d: (
        (d.normal(B, V, scale=3.0), np.zeros(B, np.int32)),
        {"temperature": 0.7, "allowed_tokens": d.allowed_tokens(B, V)},
    ),
    differentiable=(0,),
)
# The maximum is held constant in the derivative, so the final log-probability alone has a gradient (test_logprobs.py).
case("row_state", lambda d: ((d.normal(B, V, scale=3.0), d.integers(V, B)), {"temperature": 0.7}))
case("row_state[tile]", lambda d: ((d.normal(B, V), d.integers(3 * V, B)), {"start": V}))


def _states(d: Draw, parts: int) -> list[rl_fn.RowState]:
    """States of tiles, made with NumPy so that the case depends on nothing it tests."""
    tiles = d.normal(parts, B, V, scale=3.0).astype(np.float64)
    maximum = tiles.max(axis=-1)
    shifted = tiles - maximum[..., None]
    fields = (maximum, np.exp(shifted).sum(axis=-1), (shifted * np.exp(shifted)).sum(axis=-1))
    owner = np.arange(parts)[:, None] == 0
    target = np.where(owner, tiles[..., 0], -np.inf)
    columns = [x.astype(np.float32) for x in (*fields, target)]
    return [rl_fn.RowState(*(x[i] for x in columns)) for i in range(parts)]


case("merge_row_states", lambda d: (tuple(_states(d, 2)), {}))
case("finalize_row_state", lambda d: (tuple(_states(d, 1)), {}))
case(
    "linear_logprobs",
    lambda d: ((d.normal(B, T, 5), d.normal(V, 5), d.integers(V, B, T)), {"chunk": 4}),
    differentiable=(0, 1),
)
case(
    "linear_logprobs[options]",
    lambda d: (
        (d.normal(B, 5), d.normal(V, 5), np.zeros(B, np.int32)),
        {
            "bias": d.normal(V),
            "temperature": d.uniform(0.5, 2.0, B),
            "softcap": 5.0,
            "allowed_tokens": d.allowed_tokens(V),
            "chunk": 4096,
        },
    ),
    differentiable=(0, 1),
)
case("sequence_logprobs", lambda d: ((d.logprobs(), d.mask()), {}), differentiable=(0,), mask=1)
case(
    "sequence_logprobs[packed]",
    lambda d: ((d.logprobs(), d.mask()), {"segment_ids": d.segments()}),
    differentiable=(0,),
    mask=1,
)
