"""The line of an engine's log that says why it failed."""

import re

_LINE = re.compile(
    r"^(?:\([^)]*\) *)?(?:(?:ERROR|CRITICAL) .*?\] *)?"
    r"([\w.]*(?:Error|Exception): .+|Worker proc \S+ died unexpectedly \(exit code: (?:-?\d+|None)\))"
)


def root_cause(log: str) -> str | None:
    """The first error of a log; the errors after it are of processes that waited for the one that failed.

    >>> root_cause("(Core pid=7) ERROR 11-23 [core.py:9] AssertionError: Not enough nodes\\nRuntimeError: See above")
    'AssertionError: Not enough nodes'
    >>> root_cause("INFO ready") is None
    True
    """
    matches = (_LINE.match(line) for line in log.splitlines())
    return next((match[1] for match in matches if match), None)
