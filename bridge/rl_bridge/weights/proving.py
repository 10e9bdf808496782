"""The second half of a sync to engines that prove what they took over: they draw, and the trainer scores."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.engines.splitting import NeedParallel
from rl_bridge.weights.peers import WeightSyncError

if TYPE_CHECKING:
    from rl_bridge.engines.base import Engine

logger = logging.getLogger(__name__)
_ROUNDS = 4
"""Two looks at an engine, and two at a fresh one in its place."""


class Proved(NamedTuple):
    """Of all workers: what failed in each engine that was replaced by one with the new weights, proved as well.

    ``not_compared``: tensors that an engine does not show, or not in a known order; its samples alone speak for them.
    """

    replaced: tuple[str, ...]
    not_compared: int


def wants_proof(target: "Engine") -> bool:
    """Whether the target's workers carry weights into an engine of their own, and want its samples scored."""
    return {"take_weights", "prove_weights"} <= set(target.methods)


def require_scores(source: "Engine", target: "Engine") -> None:
    """Raise ValueError unless the source can score tokens."""
    lacking = {"token_logprobs", "scoring_config"} - set(source.methods)
    if lacking:
        raise ValueError(
            f"{target.name} proves its weights by log-probabilities of {source.name}, whose module has no "
            f"{' and no '.join(sorted(lacking))}; nothing was sent"
        )


def prove(source: "Engine", target: "Engine", version: int) -> Proved:
    """Carry the weights that came into the target's engines, and compare samples with the source's scores.

    The source's model stays cut as it is: it scores one short row.

    Raises:
        WeightSyncError: an engine did not get to these weights, or too many updates in a row needed a fresh engine;
            ``target.weights_version`` says what the engines have.
    """
    with _together(source, target):
        attempts = target.call("take_weights", version, source.call("scoring_config").temperature)
        for _ in range(_ROUNDS):
            sequences = {attempt.drawn.sequence: attempt.drawn.tokens for attempt in attempts if attempt.drawn}
            if not sequences:
                break
            attempts = target.call("prove_weights", _scores(source, sequences))
    replaced = tuple(f"worker {rank}: {attempt.failure}" for rank, attempt in enumerate(attempts) if attempt.failure)
    title = f"weights of {source.name} → {target.name}, version {version}"
    if any(attempt.version != version for attempt in attempts):
        raise WeightSyncError(f"{title}: the engine went back to its last proved weights\n" + "\n".join(replaced))
    if replaced:
        logger.warning("%s: the engine was replaced by one with these weights, proved\n%s", title, "\n".join(replaced))
    return Proved(replaced, sum(attempt.not_compared for attempt in attempts))


def _scores(source: "Engine", sequences: Mapping[tuple[int, ...], Sequence[int]]) -> dict[tuple[int, ...], Any]:
    """The source's log-probabilities of the last tokens of each sequence: as many as were drawn."""
    rows = list(sequences)
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
        mask[place, len(row) - len(sequences[row]) : len(row)] = True
    batch = TokenBatch(tokens, mask, lengths, groups=torch.arange(len(rows)))
    logprobs = source.call("token_logprobs", NeedParallel(batch)).cpu()
    return {row: tuple(logprobs[place][mask[place]].tolist()) for place, row in enumerate(rows)}


@contextmanager
def _together(*engines: "Engine") -> Iterator[None]:
    """Both engines stay at their devices: neither is sent away because the other is called."""
    before = [(engine, engine.__dict__.pop("before_call", None)) for engine in engines]
    try:
        yield
    finally:
        for engine, hook in before:
            if hook is not None:
                engine.before_call = hook
