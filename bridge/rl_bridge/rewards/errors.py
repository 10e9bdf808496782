"""What is wrong with a reward, with its name and the row."""


class RewardError(ValueError):
    """A reward that raises, hangs, dies or returns no finite number."""


class RowFailed(Exception):
    """Raised by a reward of a whole batch to name the trajectory that is to blame."""

    def __init__(self, place: int, reason: str) -> None:
        """``place``: its number in the batch."""
        super().__init__(reason)
        self.place = place
