"""A reward function: loaded from the user's file, called in the form that its parameters show, every value checked."""

import copy
import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from inspect import isawaitable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from rl_bridge.common import event_loop
from rl_bridge.common.scalars import FLOAT32, plain_scalar
from rl_bridge.common.user_files import belongs_to_a_thread, load_file, the_users_code
from rl_bridge.data.trajectory import Trajectory


class RewardError(ValueError):
    """A reward that raises, hangs, dies or returns no finite number."""


class RowFailed(Exception):
    """Raised by a reward of a whole batch to name the trajectory that is to blame."""

    def __init__(self, place: int, reason: str) -> None:
        """``place``: its number in the batch."""
        super().__init__(reason)
        self.place = place


# The protocol of a reward function: read off its parameters, or said by the user.

Reward = Callable[..., Any]
"""A user's reward function, of any of the protocols."""
Protocol = Literal["batch", "completion", "messages", "trl", "verl"]
"""``reward(trajectories)``; ``(completion, row)``; RL2's ``(messages, answer)``; TRL's and verl's keyword arguments."""
ALL = get_args(Protocol)
OF_LISTS: tuple[Protocol, ...] = ("batch", "trl")
"""One call has all trajectories, which the function may compare."""
TEXTS = ("completion", "response", "text")
"""Names of a parameter that gets the completion's text."""
OF_COLUMNS = ("answer", "solution", "ground_truth", "reference", "target", "gold", "expected", "truth")
"""Names of a parameter that asks for a column, where the whole row comes."""
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
    except (TypeError, ValueError):  # A function written in C may have no signature.
        signature = None
    protocol = None if signature is None else _shown(signature)
    if signature is not None and protocol is not None and _takes(signature, protocol):
        return protocol
    code = getattr(function, "__code__", None)
    where = "" if code is None else f"{code.co_filename}: "
    has = "has parameters that cannot be read" if signature is None else f"is {name}{signature}"
    raise ValueError(
        f"{where}the reward {name} {has}; a reward takes {_FORMS}: else say how it is called, with reward_protocol, "
        f"one of {', '.join(ALL)}. Behind a completion comes the whole row, which has the answer as row['answer']"
    )


def _free_names(function: Reward) -> tuple[str, ...]:
    """Names of parameters that a function may choose as it likes, but for a column's, which these do not get."""
    return tuple(name for name in _needed(inspect.signature(function)) if name not in ("row", *TEXTS))


def _needed(signature: inspect.Signature) -> list[str]:
    return [
        p.name
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]


def _takes(signature: inspect.Signature, protocol: Protocol) -> bool:
    """Whether a call of the protocol fits. The columns among TRL's keywords show with the first row only."""
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
    needed = _needed(signature)
    if "solution_str" in names:
        return "verl"
    if "completions" in names:
        return "trl"
    if len(needed) == 1:
        return None if needed[0] in (*TEXTS, "messages", "row") else "batch"
    if needed == ["messages", "answer"]:
        return "messages"
    if len(needed) == 2 and needed[0] not in ("messages", "row") and needed[1] not in ("messages", *OF_COLUMNS, *TEXTS):
        return "completion"
    return None


def calls(function: Reward, protocol: Protocol, trajectories: Sequence[Trajectory]) -> Iterator[Any]:
    """The function's return values: one for a batch, else one for each trajectory in turn.

    The function gets copies, so that it cannot change the rows that the run goes on with. Coroutines run together.
    """
    # All copies are made before the first call: the rows may be the function's own.
    arguments: list[Arguments] = []
    if protocol in OF_LISTS:
        copied = [replace(t, row=_copied(t.row), messages=copy.deepcopy(t.messages)) for t in trajectories]
        arguments.append(_trl(function, copied) if protocol == "trl" else ((copied,), {}))
    else:
        for place, trajectory in enumerate(trajectories):
            try:
                arguments.append(_ONE[protocol](trajectory))
            except Exception as error:
                raise RowFailed(place, f"no copy of its row: {type(error).__name__}: {error}") from error
    if _is_async(function):
        coroutines = [function(*args, **kwargs) for args, kwargs in arguments]
        for value, error in event_loop.run_in_order(coroutines, "reward"):
            if error is not None:
                raise error
            yield value
    else:
        for args, kwargs in arguments:
            value = function(*args, **kwargs)
            yield event_loop.run(value, "reward") if isawaitable(value) else value


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _copied(row: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(dict(row))


def _completion(trajectory: Trajectory) -> Arguments:
    return (trajectory.completion, _copied(trajectory.row)), {}


def _messages(trajectory: Trajectory) -> Arguments:
    return (list(copy.deepcopy(trajectory.messages)), copy.deepcopy(trajectory.row.get("answer"))), {}


def _verl(trajectory: Trajectory) -> Arguments:
    row = _copied(trajectory.row)
    rule = row.get("reward_model")
    truth = rule.get("ground_truth") if isinstance(rule, Mapping) else row.get("answer")
    columns = {"data_source": row.get("data_source"), "extra_info": row.get("extra_info")}
    # verl decodes all tokens behind the prompt, what a tool or a user said between two turns among them.
    text = "\n".join(str(message.get("content") or "") for message in _response(trajectory))
    return (), {**columns, "solution_str": text, "ground_truth": truth}


def _trl(function: Reward, trajectories: Sequence[Trajectory]) -> Arguments:
    """Every column as a list. Behind a prompt of messages, and with an environment, a completion is messages too."""
    rows = [t.row for t in trajectories]
    completions = [
        _response(t) if _is_chat(t.row.get("prompt")) or _is_conversation(t) else t.completion for t in trajectories
    ]
    columns = {name for row in rows for name in row} - _NOT_COLUMNS
    keywords: dict[str, Any] = {name: [row.get(name) for row in rows] for name in sorted(columns)}
    keywords |= {"prompts": [row.get("prompt") for row in rows], "completions": completions}
    keywords |= {"completion_ids": [list(t.sampled_tokens) for t in trajectories], "trainer_state": None}
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        keywords = {p.name: keywords[p.name] for p in parameters if p.name in keywords}
    return (), keywords


def _response(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The messages from the policy's first turn to its last, with all that was said between: those of its tokens."""
    last = trajectory.last_turn
    if last is None:  # rewards index the first message and the last one
        return [{"role": "assistant", "content": ""}]
    if not _is_conversation(trajectory):  # the assistant's messages before are the prompt's
        return [{"role": "assistant", "content": trajectory.completion}]
    places = (
        trajectory.turn_messages
        or [place for place, message in enumerate(trajectory.messages) if message.get("role") == "assistant"][
            -trajectory.turns :
        ]
    )
    return [dict(message) for message in trajectory.messages[places[0] : last + 1]]


def _is_conversation(trajectory: Trajectory) -> bool:
    """Whether an environment spoke with the policy: a conversation of one turn is called as those of several are."""
    return bool(trajectory.turn_messages) or trajectory.turns != 1


def _is_chat(prompt: Any) -> bool:
    """Whether a prompt is messages: neither text nor token ids."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


_ONE: dict[str, Callable[[Trajectory], Arguments]] = {"completion": _completion, "messages": _messages, "verl": _verl}


def _is_async(function: Reward) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


# Checked values.

OWN_PROCESS = "; with --reward-timeout SECONDS (reward_timeout) it is called in the main thread of a process of its own"
Values = dict[str, float]
NO_REWARD = math.nan
"""A reward's None: of no reward for this completion. ``Rewards`` refuses it, or leaves the completion out."""


class Asked:
    """A reward function under a name, with its values checked. Every error names the reward and the row.

    A function that returns a dictionary gives several rewards, by its keys.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        protocol: Protocol | None = None,
        *,
        title: str | None = None,
        apart: bool = False,
    ) -> None:
        """``protocol`` None: the parameters show it. ``title``: the function's name in messages, else its own.

        ``apart``: a function of lists looks at each trajectory by itself, as other functions do.
        """
        self.name, self.function = name, function
        self.title = title or getattr(function, "__name__", None) or name
        self.protocol: Protocol = protocol_of(function, self.title) if protocol is None else protocol
        self._free = _free_names(function) if protocol is None and self.protocol in ("batch", "completion") else ()
        self.apart = apart or self.protocol not in OF_LISTS

    def score(self, trajectories: Sequence[Trajectory]) -> Iterator[Values]:
        """The values of each trajectory by name, in order.

        Raises:
            RewardError: the function raises, exits, or does not return one finite number a trajectory.
        """
        self._require_no_columns(trajectories)
        results = calls(self.function, self.protocol, trajectories)
        whole = self.protocol in OF_LISTS
        for trajectory in trajectories[:1] if whole else trajectories:
            try:
                with the_users_code():
                    value = next(results)
            except RowFailed as error:
                failed = trajectories[error.place]
                raise RewardError(f"{self.on(failed)} failed: {error}{with_completion(failed)}") from error
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as error:
                where = self.on_all(trajectories) if whole else self.on(trajectory)
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                end = "" if whole else with_completion(trajectory)
                raise RewardError(f"{where} raised {reason}{self._way_on(error)}{end}") from error
            if whole:
                yield from self._of_batch(value, trajectories)
            else:
                yield self._values(value, trajectory)

    def _require_no_columns(self, trajectories: Sequence[Trajectory]) -> None:
        """Refuse a parameter with a column's name that would get something else."""
        for trajectory in trajectories:
            if columns := [name for name in self._free if name in trajectory.row]:
                content = "the whole batch" if self.protocol == "batch" else "the completion or the whole row"
                raise RewardError(
                    f"{self.on(trajectory)}: the parameter {columns[0]!r} would get {content}, and the data has a "
                    f"column {columns[0]!r}: write (completion, row) and read row[{columns[0]!r}], or say "
                    f"reward_protocol={self.protocol!r}"
                )

    def close(self) -> None:
        """Close the function, if it has a ``close``."""
        close = getattr(self.function, "close", None)
        if callable(close) and isawaitable(closed := close()):
            event_loop.run(closed, "reward")

    def on(self, trajectory: Trajectory) -> str:
        """The beginning of an error message about a trajectory."""
        return f"reward {self.title} on {trajectory.row.get('_where', 'a row')}"

    def on_all(self, trajectories: Sequence[Trajectory]) -> str:
        """The beginning of an error message about a whole batch."""
        if len(trajectories) == 1:
            return self.on(trajectories[0])
        last = trajectories[-1].row.get("_where", "a row")
        return f"{self.on(trajectories[0])} to {last} ({len(trajectories)} completions in one call)"

    def _way_on(self, error: BaseException) -> str:
        coroutine = _is_async(self.function)
        in_a_notebook = not coroutine and "running event loop" in str(error)
        elsewhere = belongs_to_a_thread(error) and not event_loop.in_main_thread(coroutine=coroutine)
        return OWN_PROCESS if in_a_notebook or elsewhere else ""

    def _of_batch(self, value: Any, trajectories: Sequence[Trajectory]) -> Iterator[Values]:
        columns: Any = value if isinstance(value, Mapping) else {self.name: value}
        lists: dict[str, list[Any]] = {}
        for name, column in columns.items():
            try:
                if isinstance(column, Set | bytes | bytearray):
                    raise TypeError("without an order, or text")
                if str(name) in lists:
                    raise RewardError(
                        f"{self.on_all(trajectories)} returned two rewards named {str(name)!r}, one as {short(name)}"
                    )
                lists[str(name)] = list(column)
            except TypeError:
                raise RewardError(
                    f"{self.on_all(trajectories)} returned {short(column)}, expected a list of "
                    f"{len(trajectories)} numbers, one a trajectory"
                ) from None
            if len(lists[str(name)]) != len(trajectories):
                raise RewardError(
                    f"{self.on_all(trajectories)} returned {len(lists[str(name)])} numbers for "
                    f"{len(trajectories)} trajectories{f' as {name!r}' if isinstance(value, Mapping) else ''}"
                )
        for place, trajectory in enumerate(trajectories):
            yield {name: self._number(column[place], trajectory) for name, column in lists.items()}

    def _values(self, value: Any, trajectory: Trajectory) -> Values:
        if isinstance(value, Mapping) and self.protocol == "verl":
            if "score" not in value:
                end = with_completion(trajectory)
                raise RewardError(f"{self.on(trajectory)} returned {short(value)}, expected a number named score{end}")
            value = value["score"]  # The rest is for verl's log.
        if isinstance(value, Mapping) and not value:
            end = with_completion(trajectory)
            raise RewardError(f"{self.on(trajectory)} returned {{}}, expected a number a name{end}")
        if isinstance(value, Mapping):
            if len(set(map(str, value))) < len(value):
                raise RewardError(f"{self.on(trajectory)} returned {short(value)}, with two rewards of one name")
            return {str(name): self._number(one, trajectory) for name, one in value.items()}
        return {self.name: self._number(value, trajectory)}

    def _number(self, value: Any, trajectory: Trajectory) -> float:
        if value is None:
            return NO_REWARD
        plain = plain_scalar(value)  # a list of one number is none
        expected = "a finite number"
        if isinstance(plain, bool | int | float) and not (isinstance(plain, float) and not math.isfinite(plain)):
            if abs(plain) <= FLOAT32:
                return float(plain)
            expected += f" up to {FLOAT32:.4g}, which float32 can hold"
        end = with_completion(trajectory)
        raise RewardError(f"{self.on(trajectory)} returned {short(value)}, expected {expected}{end}")


def with_completion(trajectory: Trajectory) -> str:
    """The end of an error message: the completion."""
    return f"; completion {short(trajectory.completion)}"


def short(value: Any, characters: int = 300) -> str:
    """The first characters of a value's ``repr``, for an error message."""
    try:
        text = repr(value)
    except Exception as error:  # The ``repr`` of a user's class may raise.
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= characters else f"{text[:characters]}… ({len(text)} characters)"


KINDS = ("exact", "environment", "model:FOLDER", "judge:FILE.toml", "http(s)://…")
"""The names of rewards that are no function of a file."""


def load_reward(source: str, files: dict[Path, ModuleType] | None = None) -> Callable[..., Any]:
    """The function that ``FILE.py:function`` names. The file can import the modules that lie beside it.

    ``files``: functions of one file share its module.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the source is not of that form, the file fails to load, or has no such function.
    """
    match = re.fullmatch(r"(.+\.py):([A-Za-z_]\w*)", source)
    if match is None:
        near = difflib.get_close_matches(source.partition(":")[0], [kind.partition(":")[0] for kind in KINDS])
        hint = (
            f"; did you mean {' or '.join(kind for kind in KINDS if kind.partition(':')[0] in near)}?" if near else ""
        )
        raise ValueError(f"a reward is {', '.join(KINDS)} or FILE.py:function, got {source!r}{hint}")
    path, files = Path(match[1]), {} if files is None else files
    if path not in files:
        files[path] = load_file(path, "reward")
    function: Callable[..., Any] | None = getattr(files[path], match[2], None)
    if not callable(function):
        raise ValueError(f"{path} has no function {match[2]!r}")
    return function
