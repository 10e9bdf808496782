"""What one call of a rollout may take."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of a call. What is unfinished at a limit ends by "abort", with the tokens that it has."""

    seconds: float | None = None
    """From the call's beginning."""
    request_seconds: float | None = None
    """Of one completion or conversation, from its own beginning."""
    tokens: int | None = None
    """That the policy draws in the whole call."""

    def __post_init__(self) -> None:
        """Refuse limits that leave nothing.

        Raises:
            ValueError: naming the limit.
        """
        for name in ("seconds", "request_seconds", "tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0 or None, got {value}")

    def __bool__(self) -> bool:
        """Whether there is a limit."""
        return self != Budget()

    def share(self, workers: int) -> "Budget":
        """That of each of so many workers, whose rows are as many: tokens are cut up, time passes for all.

        >>> Budget(tokens=10).share(4).tokens
        2
        """
        tokens = None if self.tokens is None else max(1, self.tokens // workers)
        return Budget(seconds=self.seconds, request_seconds=self.request_seconds, tokens=tokens)


class Spending:
    """A budget from the moment on that this is made."""

    def __init__(self, budget: Budget, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget, self.clock, self._began = budget, clock, clock()

    def over(self, tokens: int) -> bool:
        """Whether the call's time is over, or the policy has drawn all the tokens that it may."""
        budget = self.budget
        late = budget.seconds is not None and self.clock() - self._began > budget.seconds
        return late or (budget.tokens is not None and tokens >= budget.tokens)

    def late(self, began: float) -> bool:
        """Whether what began then has had its time."""
        limit = self.budget.request_seconds
        return limit is not None and self.clock() - began > limit
