"""An error in one line, for a user who did not write the library."""

import errno
import os

from rl_bridge.terminal import escaped
from rl_bridge.tracking.scrubbing import environment_secrets, scrubbed_text

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
    known = isinstance(cause, _EXPECTED) or not packages.isdisjoint(_EXPECTED_ELSEWHERE)
    return known or _is_jax_without_backend(cause)


def lines_of(error: BaseException) -> tuple[str, list[str]]:
    """(The error in one line, what else to tell the user: its notes), without secrets and what does not print."""
    cause = _cause(error)
    text = str(cause).strip()
    if _is_jax_without_backend(cause):
        platforms = os.environ.get("JAX_PLATFORMS", "")
        # Its notes are about JAX's own frames.
        return _shown(f"JAX_PLATFORMS={platforms}: {text}; unset the variable, or set JAX_PLATFORMS=cpu"), []
    if not isinstance(cause, _PLAIN) or isinstance(cause, UnicodeError) or not text:
        text = f"{type(cause).__name__}: {text}" if text else type(cause).__name__
    if isinstance(cause, OSError) and cause.errno in _ADVICE:
        unread = isinstance(cause.filename, str) and os.path.isfile(cause.filename)
        denied = cause.errno in (errno.EACCES, errno.EPERM) and unread and not os.access(cause.filename, os.R_OK)
        advice = "this user may not read the file" if denied else _ADVICE[cause.errno]
        text = f"{cause.strerror}{f': {cause.filename}' if cause.filename else ''}; {advice}"
    return _shown(" ".join(text.split())), [_shown(note) for note in _notes(error)]


def given(options: object, *names: str) -> str:
    """The values of some options, as an error's message has them: not the whole of what they belong to.

    >>> from types import SimpleNamespace
    >>> given(SimpleNamespace(steps=0, rows_per_step=4, seed=1), "steps", "rows_per_step")
    'steps=0, rows_per_step=4'
    """
    return ", ".join(f"{name}={getattr(options, name)!r}" for name in names)


def _is_jax_without_backend(error: BaseException) -> bool:
    """JAX's own error where the environment asks for a platform that it does not have here."""
    asked = bool(os.environ.get("JAX_PLATFORMS"))
    return asked and isinstance(error, RuntimeError) and str(error).startswith("Unable to initialize backend")


def _shown(text: str) -> str:
    return escaped(scrubbed_text(text, environment_secrets()))


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
    from rl_bridge.executors.errors import WorkerError  # its package imports torch

    return error.__cause__ if isinstance(error, WorkerError) and error.__cause__ is not None else error
