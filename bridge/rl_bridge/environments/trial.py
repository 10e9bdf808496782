"""A trial of an environment before a run begins: one conversation of a row, in a process of its own."""

import operator
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, NoReturn

from rl_bridge.common.terminal import remark
from rl_bridge.common.user_files import the_users_code
from rl_bridge.data.trajectory import Message
from rl_bridge.environments.environment import EnvironmentFactory, NeedsOwnProcess, Step, not_of_a_thread
from rl_bridge.environments.environment_calls import EnvironmentProcesses
from rl_bridge.environments.factories import FileFactory

ROWS = 3
"""Rows that are tried until the environment begins a conversation with one of them."""

WHATEVER_IS_SAID = re.compile(
    r"TypeError: .*\(\) (missing \d+ required|got an unexpected keyword|got multiple values|takes .*positional arg)"
    r"|NameError: (free variable|name) "
)
"""Errors of the code itself: a call that does not fit its function, a name that nothing has."""


def try_environment(
    factory: EnvironmentFactory, rows: Sequence[Mapping[str, Any]], *, limit: float, in_thread: bool
) -> tuple[Mapping[str, Any], Step, tuple[Any, ...]] | None:
    """Let an environment begin a conversation with one of the first rows and answer one empty turn of the policy.

    It happens in a process that ends with it: what the environment counts or draws in this one stays as it is, and no
    number of a run changes. What it raises at an empty turn is named and not refused, as no policy said it; an answer
    of a wrong type is refused, and so are calls that do not fit a function and names that there are not. Where a run
    calls the environment in threads of this process, nothing is refused that the trial's own process may bring about,
    as by a port that this one has: no load, no answer in time, its end.

    The trial is of this machine alone: workers on others may lack a file or a server, and say so when they call.

    Args:
        factory: makes the environment; it travels to the process.
        rows: of the data.
        limit: seconds of one call.
        in_thread: whether a run calls the environment in threads that are not the main one.

    Returns:
        The row, the first messages, and the tools of the environment; None where that was named, and not refused.

    Raises:
        ValueError: it cannot be loaded in a process, fails with each of the rows, or answers a turn with no ``Step``;
            or there are no rows.
    """
    if not rows:
        raise ValueError("an environment is tried with the first rows of the data, and there are none")
    failures: list[BaseException] = []
    try:
        processes = EnvironmentProcesses(Trial(factory, in_thread), limit=limit)
    except (ValueError, TimeoutError) as error:
        if in_thread:
            return remark(f"the environment was not tried before the run: {error}")
        raise ValueError(f"the environment was tried before the run: {error}") from error
    try:
        for row in rows[:ROWS]:
            session = processes.session()
            try:
                first = session.reset(row)
            except (Exception, SystemExit) as error:
                if in_thread and session.closing is None:
                    return remark(f"the environment was tried with {_place(row)}, and nothing is known of it: {error}")
                _close(session)
                failures.append(error)
                continue
            tools = session.tools
            _answer(session, row, first)
            return row, first, tools
    finally:
        processes.close()
    _refuse(rows[0], failures, "reset()")


def _answer(session: Any, row: Mapping[str, Any], first: Step) -> None:
    failed = f"the environment was tried with {_place(row)} and an empty turn of the policy, and failed: "
    try:
        session.step([*first.messages, {"role": "assistant", "content": ""}])
    except NeedsOwnProcess as error:
        _close(session)
        _refuse(row, [error], "step()")
    except (TimeoutError, RuntimeError) as error:  # an end of its process is one, too
        _close(session)
        if WHATEVER_IS_SAID.search(str(error)):
            raise ValueError(f"{failed}{error}. That is so whatever a turn says: mend it before the run") from error
        remark(f"{failed}{error}")
    except Exception as error:
        _close(session)
        _refuse(row, [error], "step()")
    else:
        if (error := _close(session)) is not None:
            remark(f"{failed}{error}")


def _close(session: Any) -> Exception | None:
    """End the conversation as a run does, whatever came before; the error of the environment's ``close``."""
    try:
        if session.closing is not None:
            session.closing()
    except Exception as error:
        return error
    return None


def _refuse(row: Mapping[str, Any], failures: Sequence[BaseException], method: str) -> NoReturn:
    first = failures[0]
    kind = "" if isinstance(first, NeedsOwnProcess) else f"{type(first).__name__}: "
    others = f"; so it does with {len(failures) - 1} more" if len(failures) > 1 else ""
    raise ValueError(
        f"the environment was tried before the run, and fails in {method} with {_place(row)}: {kind}{first}{others}"
    ) from first


def _place(row: Mapping[str, Any]) -> str:
    return str(row.get("_where", "the first row"))


class AtTrial(RuntimeError):
    """The user's ``step`` or ``close`` raised."""


@dataclass(frozen=True)
class Trial:
    """Makes the environment of a trial, in the trial's process."""

    factory: EnvironmentFactory
    in_thread: bool

    def load(self) -> None:
        """Load the environment's file, for which a call's limit would be short."""
        if isinstance(self.factory, FileFactory):
            self.factory.load()

    def __call__(self) -> "TrialEnvironment":
        """The user's environment, called where a run would call it."""
        return TrialEnvironment(self)


class TrialEnvironment:
    """The user's environment, whose errors in ``step`` and ``close`` are told apart from answers of a wrong type."""

    def __init__(self, trial: Trial) -> None:
        self._called = _in_thread if trial.in_thread else operator.call
        self._environment: Any = self._called(trial.factory)
        self.tools: Any = getattr(self._environment, "tools", None)

    def reset(self, row: Mapping[str, Any]) -> Any:
        """The environment's first messages."""
        return self._called(lambda: self._environment.reset(row))

    def step(self, messages: Sequence[Message]) -> Any:
        """The environment's answer.

        Raises:
            AtTrial: it raised.
        """
        return self._tried(lambda: self._environment.step(messages))

    def close(self) -> Any:
        """The environment's own ``close``, if it has one.

        Raises:
            AtTrial: it raised.
        """
        close = getattr(self._environment, "close", None)
        return self._tried(close) if callable(close) else None

    def _tried(self, work: Callable[[], Any]) -> Any:
        try:
            answer = self._called(work)
        except NeedsOwnProcess:
            raise
        except (Exception, SystemExit) as error:
            raise AtTrial(f"{type(error).__name__}: {error}") from error
        return _awaited(answer) if isawaitable(answer) else answer


async def _awaited(answer: Awaitable[Any]) -> Any:
    try:
        return await answer
    except (Exception, SystemExit) as error:
        raise AtTrial(f"{type(error).__name__}: {error}") from error


def _in_thread(work: Callable[[], Any]) -> Any:
    results: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            with the_users_code(), not_of_a_thread():
                results.append((work(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run, daemon=True, name="environment")
    thread.start()
    thread.join()
    ((value, failure),) = results
    if failure is not None:
        raise failure
    return value
