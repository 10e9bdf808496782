"""Where the seconds of the tests go, by folder and by file: ``make durations``.

    python -m tests.durations JUNIT.xml

Seconds are those of each test with its fixtures, on whichever core: their sum is more than the run takes.
"""

import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

LONGEST = 40


def table(cases: Iterable[tuple[str, float]]) -> str:
    """Markdown of pairs of a file and a test's seconds.

    >>> print(table([("tests/a/b/test_x.py", 2.0), ("tests/a/test_y.py", 1.0), ("tests/a/b/test_x.py", 0.5)]))
    # Seconds of the tests
    <BLANKLINE>
    3 tests, 4 s.
    <BLANKLINE>
    | folder | tests | seconds |
    |---|---|---|
    | `tests/a/b` | 2 | 2 |
    | `tests/a` | 1 | 1 |
    <BLANKLINE>
    | file | tests | seconds |
    |---|---|---|
    | `tests/a/b/test_x.py` | 2 | 2 |
    | `tests/a/test_y.py` | 1 | 1 |
    <BLANKLINE>
    """
    folders, files = defaultdict(list), defaultdict(list)
    for file, seconds in cases:
        files[file].append(seconds)
        folders[str(Path(file).parent)].append(seconds)
    every = [seconds for group in files.values() for seconds in group]
    parts = [f"# Seconds of the tests\n\n{len(every)} tests, {sum(every):.0f} s.\n"]
    for kind, groups in (("folder", folders), ("file", files)):
        longest = sorted(groups.items(), key=lambda item: -sum(item[1]))[:LONGEST]
        rows = [f"| `{name}` | {len(group)} | {sum(group):.0f} |" for name, group in longest]
        parts.append("\n".join([f"| {kind} | tests | seconds |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def cases_of(report: Path) -> list[tuple[str, float]]:
    """File and seconds of each test in a report that ``pytest --junitxml`` wrote, with ``junit_family=xunit1``."""
    return [(case.get("file", "?"), float(case.get("time", 0))) for case in ET.parse(report).iter("testcase")]


if __name__ == "__main__":
    print(table(cases_of(Path(sys.argv[1]))))
