"""An error in one line, for a user who did not write the library."""

import errno

from rl_bridge.executors.errors import WorkerError

_ADVICE = {
    errno.ENOSPC: "free some space on the disk",
    errno.EDQUOT: "free some space within the quota",
    errno.EROFS: "give --output a folder that can be written to",
    errno.EACCES: "give --output a folder that can be written to",
    errno.EPERM: "give --output a folder that can be written to",
}
_PLAIN = (ValueError, FileNotFoundError, ModuleNotFoundError, NotImplementedError)
"""Their messages are written for the user and need no name of a class in front."""
_EXPECTED = (*_PLAIN, OSError, FloatingPointError, MemoryError, TypeError)
"""What a user's input, files, functions or machine can bring about."""
_EXPECTED_ELSEWHERE = {
    "safetensors",
    "safetensors_rust",
    "jinja2",
    "huggingface_hub",
    "rl_bridge",
    "torch",
}
"""Packages whose own classes of errors are about files, templates and machines too."""


def is_expected(error: BaseException) -> bool:
    """Whether one line says enough about an error."""
    cause = _cause(error)
    packages = {kind.__module__.split(".")[0] for kind in type(cause).__mro__}
    return isinstance(cause, _EXPECTED) or not packages.isdisjoint(_EXPECTED_ELSEWHERE)


def lines_of(error: BaseException) -> tuple[str, list[str]]:
    """(The error in one line, what else to tell the user: its notes)."""
    cause = _cause(error)
    text = str(cause).strip()
    if not isinstance(cause, _PLAIN) or isinstance(cause, UnicodeError) or not text:
        text = f"{type(cause).__name__}: {text}" if text else type(cause).__name__
    if isinstance(cause, OSError) and cause.errno in _ADVICE:
        text = f"{cause.strerror}{f': {cause.filename}' if cause.filename else ''}; {_ADVICE[cause.errno]}"
    return " ".join(text.split()), _notes(error)


def _notes(error: BaseException) -> list[str]:
    """Of the error, or of the one behind which it was raised: closing what a dead worker holds fails once more."""
    behind: BaseException | None = error
    while behind is not None:
        if notes := getattr(behind, "__notes__", []):
            return list(notes)
        behind = behind.__cause__ or behind.__context__
    return []


def _cause(error: BaseException) -> BaseException:
    """What a worker raised, in place of the driver's account of it with the traceback."""
    return error.__cause__ if isinstance(error, WorkerError) and error.__cause__ is not None else error
