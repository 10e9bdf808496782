"""What a terminal is shown: nothing that came from outside moves the cursor, hides text or turns it around.

The words of a user's files, of servers and of libraries reach the terminal by ``say`` alone.
"""

import sys
from typing import TextIO

_KEPT = "\n\t"


def escaped(text: str) -> str:
    """The text with every character that does not print written as Python writes it; lines and tabs stay.

    >>> escaped("run \\x1b[2J\\u202etxt\\n")
    'run \\\\x1b[2J\\\\u202etxt\\n'
    """
    if all(character.isprintable() or character in _KEPT for character in text):
        return text
    return "".join(
        character if character.isprintable() or character in _KEPT else ascii(character)[1:-1] for character in text
    )


def say(text: str, *, error: bool = False, flush: bool = False) -> None:
    """Print a line, to the standard error with ``error``."""
    stream: TextIO = sys.stderr if error else sys.stdout
    print(escaped(text), file=stream, flush=flush)
