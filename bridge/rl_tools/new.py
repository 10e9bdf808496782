"""``rl-fn new``: a loop to begin with, written as a file of the user's own.

The file stands alone as each command's does: the command line imports what was asked for and nothing else.
"""

import argparse
import ast
from collections.abc import Sequence
from pathlib import Path

from rl_bridge.common.terminal import say

PACKAGED = Path(__file__).parent / "examples"
CHECKOUT = Path(__file__).parents[2] / "examples"


def loops() -> dict[str, Path]:
    """Name → file, of the loops: those of the installed package, or of the checkout that is installed as it is."""
    folder = PACKAGED if PACKAGED.is_dir() else CHECKOUT
    return {file.stem: file for file in sorted(folder.glob("*.py")) if file.stem != "__init__"}


def about(file: Path) -> str:
    """The first line of a loop's docstring."""
    return (ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "").partition("\n")[0]


def run(words: Sequence[str]) -> int:
    """Run ``rl-fn new`` with these words; returns the exit status.

    Raises:
        ValueError: the file is there already, or is no Python file.
    """
    files = loops()
    parser = argparse.ArgumentParser(
        prog="rl-fn new",
        description="Write a whole loop, to be read, changed and run.",
        epilog="\n".join(f"{name:<16}{about(file)}" for name, file in files.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("loop", choices=files, metavar="LOOP", help="one of those below")
    parser.add_argument("file", type=Path, help="the file to write, as my_loop.py")
    arguments = parser.parse_args(list(words))
    file: Path = arguments.file
    if file.suffix != ".py":
        raise ValueError(f"{file} is no Python file: give a name that ends in .py")
    text = files[arguments.loop].read_text("utf-8")
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ValueError(f"{file} is there already, and stays as it is: give another name") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror}") from error
    say(f"{file}: {len(text.splitlines())} lines; python {file} --help")
    return 0
