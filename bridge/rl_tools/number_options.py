"""Numbers on the command line of a tool: each with its bounds, and refused by its option's name where it is read."""

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

SEEDS = 2**32 - 1
"""The largest seed of a run."""


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option that takes whole numbers from ``least`` on, up to ``most``.

    >>> whole(1)("8")
    8
    """
    what = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}") from None
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")
        return value

    return read


def number(least: float | None = None, *, above: float = 0.0) -> Callable[[str], float]:
    """The type of an option that takes finite numbers from ``least`` on, or all ``above`` one.

    >>> number(least=0)("0.5")
    0.5
    """
    what = f"a finite number above {above:g}" if least is None else f"a finite number from {least:g} on"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not ((value > above if least is None else value >= least) and value < math.inf):
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")
        return value

    return read


class Parser(argparse.ArgumentParser):
    """A parser to which ``-1GiB`` and ``-inf`` are values: the option refuses them, and not for having no value."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore
        """The words, with each value that begins like a negative number joined to its option."""
        return super().parse_known_args(self._joined(sys.argv[1:] if args is None else args), namespace)

    def _joined(self, words: Sequence[str]) -> list[str]:
        takes_one = {name for action in self._actions for name in action.option_strings if action.nargs in (None, "?")}
        joined: list[str] = []
        for word in words:
            if joined and joined[-1] in takes_one and re.match(r"-(\d|\.|inf|nan)", word, re.IGNORECASE):
                joined[-1] += f"={word}" if joined[-1].startswith("--") else word
            else:
                joined.append(word)
        return joined
