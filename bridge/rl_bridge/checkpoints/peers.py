"""Steps that the writers of a checkpoint take together. An error of one ends all of them, with its name."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from rl_bridge.checkpoints.errors import CheckpointError

T = TypeVar("T")
R = TypeVar("R")


def together(
    what: str,
    group: dist.ProcessGroup | None,
    share: Callable[[], T],
    combine: Callable[[list[T]], list[R]],
) -> R:
    """Every writer computes its ``share``; the first combines them, in order, into an answer for each.

    ``group`` is of the checkpoint's own and of gloo: on the training's group its messages would meet those of the
    backward pass. None is a single writer.

    Raises:
        CheckpointError: a share or the combination raised, here or elsewhere.
    """
    value, failure, cause = _attempt(share)
    size = 1 if group is None else group.size()
    shares: list[Any] = [(value, failure)]
    if group is not None:
        gathered = [None] * size if group.rank() == 0 else None
        dist.gather_object((value, failure), gathered, group=group, group_dst=0)
        shares = gathered or []
    answers: list[Any] = []
    if shares:  # this is the first
        failures = [f"writer {place}: {failure}" for place, (_, failure) in enumerate(shares) if failure is not None]
        if failures:
            answers = [(None, "; ".join(failures))] * size
        else:
            combined, failure, cause = _attempt(lambda: combine([value for value, _ in shares]))
            answers = [(None, failure)] * size if failure else [(one, None) for one in combined]
    answer: list[Any] = answers[:1]
    if group is not None:
        answer = [None]
        dist.scatter_object_list(answer, answers or None, group=group, group_src=0)
    result, failure = answer[0]
    if failure is not None:
        raise CheckpointError(f"{what}: {failure}") from cause
    return result


def _attempt(function: Callable[[], Any]) -> tuple[Any, str | None, BaseException | None]:
    try:
        return function(), None, None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}", error
