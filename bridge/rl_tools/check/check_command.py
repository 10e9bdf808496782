"""``rl-fn check``: our dialects against an installed library, or the laws of a loss of the user's own."""

from collections.abc import Sequence

from rl_bridge.common.terminal import say
from rl_tools.check.cases import LIBRARIES, check_library
from rl_tools.check.loss_laws import verdicts

USAGE = f"""usage: rl-fn check {{{",".join(LIBRARIES)}}}
       rl-fn check FILE.py:LOSS

A library: the value and the gradient of rl_fn's dialect of an installed library beside those of the library's own
functions, on random batches: a table, and status 1 if any differ beyond rounding, 2 if the library is not installed.

A loss: whether a function of your own, as --objective.loss takes one, obeys the laws that those of rl_fn obey, on
random batches with holes, rows without a token and policies that have moved far: each law with the first place where
the loss breaks it, then what its gradient is. Status 1 if a law is broken."""


def check(arguments: Sequence[str]) -> int:
    """`rl-fn check LIBRARY` or `FILE.py:LOSS`: 0 if all holds, 1 if something does not, 2 without the library."""
    if {"--help", "-h"} & set(arguments):
        say(USAGE)
        return 0
    if len(arguments) == 1 and ".py:" in arguments[0]:
        return _check_loss(arguments[0])
    if len(arguments) != 1 or arguments[0] not in LIBRARIES:
        say(USAGE)
        names = " ".join(arguments) or "none"
        choices = f"one library of {', '.join(LIBRARIES)}, or a loss FILE.py:name"
        say(f"rl-fn: error: rl-fn check takes {choices}, got {names}", error=True)
        return 2
    return check_library(arguments[0])


def _check_loss(source: str) -> int:
    laws, notes = verdicts(source)
    for law in laws:
        say(f"broken  {law.law}: {law.problem}" if law.problem else f"ok      {law.law}")
    for note in notes:
        say(f"note    {note}")
    broken = sum(bool(law.problem) for law in laws)
    say(f"{len(laws) - broken} of {len(laws)} laws hold")
    return 1 if broken else 0
