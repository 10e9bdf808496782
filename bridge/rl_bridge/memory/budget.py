"""How many tokens a micro-batch may have: more while there is room, fewer before it is short, half where it was not."""

from dataclasses import dataclass, field

LEAST, MOST, START = 64, 1 << 20, 4096


@dataclass
class TokenBudget:
    """A state machine without a clock: it is told what a step took, and says what the next one may.

    >>> budget = TokenBudget()
    >>> budget.measured(base=10, peak=20, room=100, tokens=4096)
    >>> budget.tokens
    8192
    >>> budget.failed()
    True
    >>> budget.tokens, budget.ceiling
    (4096, 6144)
    """

    tokens: int = START
    """Of the next micro-batches."""
    ceiling: int = MOST
    """What memory was short of once is not tried again."""
    failures: int = 0
    """How often memory was short."""
    share: float = field(default=0.8, kw_only=True)
    """Of the room that a step may take, by what the last one took a token."""

    def measured(self, *, base: int, peak: int, room: int, tokens: int) -> None:
        """Of a step: bytes before it, at its peak, and in all; ``tokens`` of its largest micro-batch.

        The budget at most doubles, and only where a micro-batch used it: of a smaller one nothing is learnt.
        """
        if tokens < 1 or room < 1:
            return
        each = max(0, peak - base) / tokens
        fitting = int((self.share * room - base) / each) if each else 2 * self.tokens
        if fitting < self.tokens:
            self.tokens = max(LEAST, min(self.tokens, fitting))
        elif 2 * tokens >= self.tokens:
            self.tokens = max(self.tokens, min(2 * self.tokens, fitting, self.ceiling))

    def failed(self) -> bool:
        """Memory was short: half as many. False where there are no fewer."""
        self.failures += 1
        if self.tokens <= LEAST:
            return False
        self.ceiling = max(LEAST, 3 * self.tokens // 4)
        self.tokens = max(LEAST, self.tokens // 2)
        return True
