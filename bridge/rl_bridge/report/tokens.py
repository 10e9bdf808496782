"""Completions over time for the page: as many steps as it has room for, the first and the last among them."""

import json
from collections.abc import Sequence
from typing import Any

from rl_bridge.report.reading import RunFiles

CHARACTERS = 1_000_000
"""Of all completions in a page, about."""


def completions_of(runs: Sequence[RunFiles], room: int = CHARACTERS) -> list[dict[str, Any]]:
    """For each run its steps with samples, thinned evenly until they fit; ``left_out`` is how many steps are not in.

    A step that alone has no room stays as long as it is the last one.
    """
    share = room // max(1, len(runs))
    return [_of_run(run.completions, share) for run in runs]


def _of_run(lines: Sequence[dict[str, Any]], room: int) -> dict[str, Any]:
    sizes = [len(json.dumps(line)) for line in lines]
    chosen, distance = list(range(len(lines))), 1
    while sum(sizes[place] for place in chosen) > room and len(chosen) > 1:
        distance *= 2
        # Counted from the end: the last step is the one that is looked at first.
        chosen = sorted(range(len(lines) - 1, -1, -distance))
        chosen = [0, *chosen] if 0 not in chosen and len(chosen) > 1 else chosen
    return {"steps": [lines[place] for place in chosen], "left_out": len(lines) - len(chosen)}
