"""An order of the tests that a seed draws: a test must not need what ran before it (CORE-14)."""

import random
from collections.abc import Sequence
from typing import Any


def in_random_order(items: Sequence[Any], seed: int) -> list[Any]:
    """Files in a random order, and the tests of each: those of one file stay together, for they share fixtures."""
    draw = random.Random(seed)
    files: dict[str, list[Any]] = {}
    for item in items:
        files.setdefault(item.nodeid.split("::")[0], []).append(item)
    names = sorted(files)
    draw.shuffle(names)
    found = []
    for name in names:
        tests = sorted(files[name], key=lambda item: item.nodeid)
        draw.shuffle(tests)
        found += tests
    return found
