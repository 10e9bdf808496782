"""One reward function asked about trajectories: every value is checked, every error names the reward and the row."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rl_bridge.data.trajectory import Trajectory
from rl_bridge.rewards.errors import RewardError, RowFailed
from rl_bridge.rewards.protocols import OF_LISTS, Protocol, calls, protocol_of
from rl_bridge.user_files import the_users_code

FLOAT32 = 3.4028234663852886e38
"""Rewards become float32 tensors: a larger one would be infinite."""
Values = dict[str, float]


class Asked:
    """A function under a name. A function that returns a dictionary gives several rewards, by its keys."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        protocol: Protocol | None = None,
        *,
        title: str | None = None,
        apart: bool = False,
    ) -> None:
        """``protocol`` None: what the function's parameters show. ``title``: its name in messages, else its own.

        ``apart``: a function of lists looks at each trajectory by itself, as any other does.
        """
        self.name, self.function = name, function
        self.title = title or getattr(function, "__name__", None) or name
        self.protocol: Protocol = protocol_of(function, self.title) if protocol is None else protocol
        self.apart = apart or self.protocol not in OF_LISTS

    def score(self, trajectories: Sequence[Trajectory]) -> Iterator[Values]:
        """The values of each trajectory by name, in order.

        Raises:
            RewardError: the function raises, exits, or returns what is no finite number, or not one a trajectory.
        """
        results = calls(self.function, self.protocol, trajectories)
        whole = self.protocol in OF_LISTS
        for trajectory in trajectories[:1] if whole else trajectories:
            try:
                with the_users_code():
                    value = next(results)
            except RowFailed as error:
                failed = trajectories[error.place]
                raise RewardError(f"{self.on(failed)} failed: {error}{said(failed)}") from error
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as error:
                where = self.on_all(trajectories) if whole else self.on(trajectory)
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                raise RewardError(f"{where} raised {reason}{'' if whole else said(trajectory)}") from error
            if whole:
                yield from self._of_batch(value, trajectories)
            else:
                yield self._values(value, trajectory)

    def close(self) -> None:
        """Close what the function holds, if it can be closed."""
        close = getattr(self.function, "close", None)
        if callable(close):
            close()

    def on(self, trajectory: Trajectory) -> str:
        """How an error message begins."""
        return f"reward {self.title} on {trajectory.row.get('_where', 'a row')}"

    def on_all(self, trajectories: Sequence[Trajectory]) -> str:
        """The same of a whole batch."""
        if len(trajectories) == 1:
            return self.on(trajectories[0])
        last = trajectories[-1].row.get("_where", "a row")
        return f"{self.on(trajectories[0])} to {last} ({len(trajectories)} completions in one call)"

    def _of_batch(self, value: Any, trajectories: Sequence[Trajectory]) -> Iterator[Values]:
        columns: Any = value if isinstance(value, Mapping) else {self.name: value}
        lists: dict[str, list[Any]] = {}
        for name, column in columns.items():
            try:
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
            value = value.get("score")  # the rest is for its log
        if isinstance(value, Mapping) and not value:
            raise RewardError(f"{self.on(trajectory)} returned {{}}, expected a number a name{said(trajectory)}")
        if isinstance(value, Mapping):
            return {str(name): self._number(one, trajectory) for name, one in value.items()}
        return {self.name: self._number(value, trajectory)}

    def _number(self, value: Any, trajectory: Trajectory) -> float:
        # Scalars of numpy, torch and jax; a list of one number is none.
        plain = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
        expected = "a finite number"
        if isinstance(plain, bool | int | float) and not (isinstance(plain, float) and not math.isfinite(plain)):
            if abs(plain) <= FLOAT32:
                return float(plain)
            expected += f" up to {FLOAT32:.4g}, which float32 can hold"
        raise RewardError(f"{self.on(trajectory)} returned {short(value)}, expected {expected}{said(trajectory)}")


def said(trajectory: Trajectory) -> str:
    """How an error message ends: with the completion."""
    return f"; completion {short(trajectory.completion)}"


def short(value: Any, characters: int = 300) -> str:
    """What an error message prints of a value."""
    try:
        text = repr(value)
    except Exception as error:  # the user's own class
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= characters else f"{text[:characters]}… ({len(text)} characters)"
