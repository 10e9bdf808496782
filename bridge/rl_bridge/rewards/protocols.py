"""How a reward function wants to be called: read off its parameters, or said by the user."""

import asyncio
import copy
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from rl_bridge.data.trajectory import Trajectory

Reward = Callable[..., Any]
"""A user's reward function, of any of the protocols."""
Protocol = Literal["batch", "completion", "messages", "trl", "verl"]
"""``reward(trajectories)``; ``(completion, row)``; RL2's ``(messages, answer)``; TRL's and verl's keyword arguments."""
ALL = get_args(Protocol)
OF_LISTS: tuple[Protocol, ...] = ("batch", "trl")
"""One call has all trajectories, which the function may compare."""
_FORMS = (
    "(completion, row), (messages, answer), (trajectories) for a whole batch, (prompts, completions, columns of the "
    "data by name) as TRL's or (data_source, solution_str, ground_truth, extra_info) as verl's"
)
_NOT_COLUMNS = {"prompt", "prompts", "completion", "completions", "completion_ids", "_where"}


def protocol_of(function: Reward, name: str) -> Protocol:
    """The protocol that the function's parameters show.

    >>> protocol_of(lambda messages, answer: 0.0, "mine"), protocol_of(lambda trajectories: [], "mine")
    ('messages', 'batch')

    Raises:
        ValueError: they show none, or the function could not be called by the one that they show; with its file.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function written in C, there may be none
        signature = None
    found = None if signature is None else _shown(signature)
    if signature is not None and found is not None and _takes(signature, found):
        return found
    code = getattr(function, "__code__", None)
    where = "" if code is None else f"{code.co_filename}: "
    has = "has parameters that cannot be read" if signature is None else f"is {name}{signature}"
    raise ValueError(
        f"{where}the reward {name} {has}; a reward takes {_FORMS}: else say how it is called, with reward_protocol, "
        f"one of {', '.join(ALL)}"
    )


def _takes(signature: inspect.Signature, protocol: Protocol) -> bool:
    """Whether a call of the protocol fits. Which columns TRL's keywords may name shows with the first row."""
    try:
        if protocol == "trl":
            signature.bind_partial(completions=None)
        elif protocol == "verl":
            signature.bind(**dict.fromkeys(("data_source", "solution_str", "ground_truth", "extra_info")))
        else:
            signature.bind(*[None] * (1 if protocol == "batch" else 2))
    except TypeError:
        return False
    return True


def _shown(signature: inspect.Signature) -> Protocol | None:
    parameters = signature.parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.kind is not p.VAR_POSITIONAL]
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if "solution_str" in names:
        return "verl"
    if "completions" in names:
        return "trl"
    if len(needed) == 1:
        return "batch"
    if len(needed) == 2:
        return "messages" if needed[0] == "messages" or needed[1] == "answer" else "completion"
    return None


def calls(function: Reward, protocol: Protocol, trajectories: Sequence[Trajectory]) -> Iterator[Any]:
    """What the function returns: of a batch one value, else one for each trajectory in turn.

    The function gets copies, so that it cannot change the rows that the run goes on with. Coroutines run together.
    """
    copied = [replace(t, row=copy.deepcopy(dict(t.row)), messages=copy.deepcopy(t.messages)) for t in trajectories]
    asked = (
        [_trl(function, copied)] if protocol == "trl" else [] if protocol == "batch" else map(_ONE[protocol], copied)
    )
    if protocol == "batch":
        asked = [((copied,), {})]
    if _is_async(function):
        for value in _finished([function(*args, **kwargs) for args, kwargs in asked]):
            if isinstance(value, BaseException):
                raise value
            yield value
    else:
        for args, kwargs in asked:
            yield function(*args, **kwargs)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _completion(trajectory: Trajectory) -> Arguments:
    return (trajectory.completion, trajectory.row), {}


def _messages(trajectory: Trajectory) -> Arguments:
    return (list(trajectory.messages), trajectory.row.get("answer")), {}


def _verl(trajectory: Trajectory) -> Arguments:
    row = trajectory.row
    rule = row.get("reward_model")
    truth = rule.get("ground_truth") if isinstance(rule, Mapping) else row.get("answer")
    named = {"data_source": row.get("data_source"), "extra_info": row.get("extra_info")}
    return (), {**named, "solution_str": trajectory.completion, "ground_truth": truth}


def _trl(function: Reward, trajectories: Sequence[Trajectory]) -> Arguments:
    """Every column as a list. Behind a prompt of messages, the completion is messages too."""
    rows = [t.row for t in trajectories]
    said = [
        [{"role": "assistant", "content": t.completion}] if _is_chat(t.row.get("prompt")) else t.completion
        for t in trajectories
    ]
    columns = {name for row in rows for name in row} - _NOT_COLUMNS
    given: dict[str, Any] = {name: [row.get(name) for row in rows] for name in sorted(columns)}
    given |= {"prompts": [row.get("prompt") for row in rows], "completions": said}
    given |= {"completion_ids": [list(t.sampled_tokens) for t in trajectories], "trainer_state": None}
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        given = {p.name: given[p.name] for p in parameters if p.name in given}
    return (), given


def _is_chat(prompt: Any) -> bool:
    """Whether a prompt is messages: neither text nor token ids."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


_ONE: dict[str, Callable[[Trajectory], Arguments]] = {"completion": _completion, "messages": _messages, "verl": _verl}


def _is_async(function: Reward) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _finished(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results in order, or the exceptions. In a thread of its own: the caller may be inside a running loop."""

    async def together() -> list[Any]:
        return await asyncio.gather(*coroutines, return_exceptions=True)

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(_outcome(together)), name="rewards", daemon=True)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _outcome(run: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    try:
        return asyncio.run(run())
    except BaseException as error:  # as sys.exit() inside a coroutine: raised again where the reward was asked
        return error
