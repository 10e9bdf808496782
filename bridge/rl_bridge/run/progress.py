"""The progress line of a stage: steps, time, and as many numbers as the terminal has room for.

It stands alone because it knows a terminal and no run.
"""

import shutil
from collections.abc import Mapping

from tqdm import tqdm

SHOWN = {"reward": "reward", "nll": "nll", "loss": "loss", "accuracy": "accuracy", "kl": "KL", "entropy": "entropy"}
SHOWN |= {"clip_fraction": "clip"}
"""Number of a record → its label."""
NARROW = 120
"""Columns below which the progress line has numbers and no bar."""
NARROW_BAR, NARROW_BAR_TAKES = "{desc} {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]", 38


class Bar(tqdm):
    """The progress of one stage."""

    def __init__(self, stage: str, first: int, total: int) -> None:
        columns = shutil.get_terminal_size().columns
        narrow = columns < NARROW
        self._room = columns - NARROW_BAR_TAKES if narrow else columns
        super().__init__(
            total=total,
            initial=first,
            desc=stage,
            unit="step",
            dynamic_ncols=True,
            mininterval=0.5,
            bar_format=NARROW_BAR if narrow else None,
        )

    def show(self, record: Mapping[str, float], skips: int) -> None:
        """The first numbers of a record for which there is room."""
        entries = {label: f"{record[name]:.3f}" for name, label in SHOWN.items() if name in record}
        entries |= {"skipped": str(skips)} if skips else {}
        if "tokens_per_second" in record:
            entries["tok/s"] = f"{record['tokens_per_second']:.0f}"
        self.set_postfix(fitting(entries, self._room), refresh=False)


def fitting(entries: Mapping[str, str], room: int) -> dict[str, str]:
    """The first entries that fit into ``room`` characters. A number that is cut off would be another number.

    >>> fitting({"reward": "0.641", "KL": "0.141", "entropy": "0.301"}, 24)
    {'reward': '0.641', 'KL': '0.141'}
    """
    first: dict[str, str] = {}
    for name, value in entries.items():
        room -= len(f"{name}={value}, ")
        if room < 0:
            break
        first[name] = value
    return first
