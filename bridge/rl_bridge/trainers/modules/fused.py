"""A policy's loss in the head itself: each logit is computed once in a step, not once forward and once backward."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.parallel.head import token_loss
from rl_bridge.trainers.modules.scoring import TokenScorer, following
from rl_fn import Batch, Objective

TOLERANCE = 1e-4


@functools.cache
def require_token_local(objective: Objective) -> None:
    """Refuse a loss in which the term of a token depends on another token: the head sees some tokens at a time.

    Raises:
        ValueError: with the objective's name and what in it may be the reason.
    """
    rng = np.random.default_rng(0)
    fields = {name: jnp.asarray(rng.normal(-1.0, 0.5, (2, 6)), jnp.float32) for name in Batch._fields}
    fields |= {"mask": jnp.ones((2, 6), bool), "segment_ids": None, "correct": jnp.ones((2, 6), bool)}

    def total(leaves: list[Any], cuts: list[dict[str, Any]]) -> Any:
        parts = [{**cut, "logprobs": x, "entropies": e} for cut, (x, e) in zip(cuts, leaves, strict=True)]
        return sum(objective.share(Batch(**part), 12.0)[0] for part in parts)  # pyright: ignore[reportArgumentType]

    def gradient(cuts: list[dict[str, Any]]) -> list[Any]:
        found = jax.jit(jax.grad(total))([(cut["logprobs"], cut["entropies"]) for cut in cuts], cuts)
        return [jnp.concatenate([jnp.ravel(part[place]) for part in found]) for place in (0, 1)]

    def cut(start: int, stop: int) -> dict[str, Any]:
        return {name: None if x is None else jnp.ravel(x)[start:stop] for name, x in fields.items()}

    whole, apart = gradient([fields]), gradient([cut(0, 5), cut(5, 12)])
    gap = max(float(jnp.abs(a - b).max()) for a, b in zip(whole, apart, strict=True))
    if objective.over_batch or not gap <= TOLERANCE * max(float(jnp.abs(x).max()) for x in whole):
        raise ValueError(
            f"fused_loss takes losses in which no token's term depends on another token; that of {objective.name} does:"
            f" loss={objective.loss}, aggregation={objective.aggregation}, correction={objective.correction}"
        )


def fused_share(
    module: TokenScorer,
    share: Callable[..., Any],
    batch: TokenBatch,
    numbers: Mapping[str, float],
    names: tuple[str, ...],
    entropy: bool,
    *,
    seen: Callable[[torch.Tensor, torch.Tensor, slice], None] | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Loss and metrics of a micro-batch, as ``share`` of its log-probabilities. ``entropy``: it takes a gradient.

    ``seen`` is called with the log-probabilities and entropies of the tokens that the head has at a time.
    """
    module.require_weights()
    if module.arrangements.head != "linear":
        name = type(module.model).__name__
        raise ValueError(f"fused_loss needs a head that is one matrix, and {name} does more: train without fused_loss")
    fields, documents = module.read(batch)
    inputs, targets, counted = fields[:3]
    flat = {name: None if (x := getattr(batch, name)) is None else following(x).flatten(0, 1) for name in names}
    scalars = {name: torch.tensor(float(value), device=inputs.device) for name, value in numbers.items()}
    denominator = scalars.pop("denominator")

    def loss(logprobs: torch.Tensor, entropies: torch.Tensor, _: torch.Tensor, rows: slice) -> tuple[Any, Any]:
        if seen is not None:
            seen(logprobs, entropies, rows)
        of_rows: dict[str, Any] = {name: None if x is None else x[rows] for name, x in flat.items()}
        of_rows |= {"logprobs": logprobs, "entropies": entropies if entropy else entropies.detach()}
        return share(Batch(**of_rows), denominator, scalars)

    options: dict[str, Any] = {"temperature": module.scoring.temperature, "softcap": module.scoring.softcap}
    options |= {"mask": counted, "allowed_tokens": fields[3] if len(fields) > 3 else None}
    with module.autocast(inputs.device):
        if documents is None:
            return token_loss(module.model, inputs, targets, loss, use_cache=False, **options)
        options |= module.packed_kwargs(documents) | {"rows": lambda hidden: documents.put(hidden, inputs.shape)}
        return token_loss(module.model, documents.take(inputs), targets, loss, **options)
