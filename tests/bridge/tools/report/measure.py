"""How long the page of a run of 1000 steps takes to open: ``python -m tests.bridge.tools.report.measure``.

One run, and three seeds of it, with 24 metrics a step and 100 kept steps of four completions of 200 tokens.
"""

import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

from rl_tools.report.page import write_report
from tests.bridge.tools.report.browser import Page, browser
from tests.bridge.tools.report.runs import record, sample, write_lines, write_run

TIMES = "(() => { const n = performance.getEntriesByType('navigation')[0], p = performance.getEntriesByName("
TIMES += "'first-contentful-paint')[0]; return {dom_content_loaded: n.domContentLoadedEventEnd, "
TIMES += "first_contentful_paint: p ? p.startTime : null, load: n.loadEventEnd}; })()"
OPENED = 5


def long_run(folder: Path, seed: int) -> Path:
    """A folder as a run of 1000 steps leaves it."""
    draw = random.Random(seed)
    write_run(folder, steps=1, seed=seed)
    names = ["reward", "kl", "entropy", "clip_fraction", *(f"metric_{number}" for number in range(20))]
    records = [record(step, **{name: draw.gauss(0, 1) for name in names}) for step in range(1000)]
    write_lines(folder / "metrics.jsonl", records)
    text = ("word ",) * 200
    lines = [{"step": step, "samples": [sample(step, text) for _ in range(4)]} for step in range(0, 1000, 10)]
    write_lines(folder / "completions.jsonl", lines)
    return folder


def opened(page: Page, file: Path, width: int) -> dict[str, float]:
    """Medians of the page's own times, in milliseconds, over some openings."""
    found = []
    for _ in range(OPENED):
        page.open(file, width, mobile=width < 500)
        found.append(page.run(TIMES))
    return {name: round(statistics.median(times[name] for times in found), 1) for name in found[0]}


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name, browser(name) as page:
        folder = Path(name)
        runs = [long_run(folder / f"seed{seed}", seed) for seed in range(3)]
        for count in (1, 3):
            size = write_report(runs[:count], folder / "report.html")
            for width in (1440, 390):
                times = opened(page, folder / "report.html", width)
                json.dump({"runs": count, "megabytes": round(size / 1e6, 2), "width": width, **times}, sys.stdout)
                print()
        assert page.errors == []


if __name__ == "__main__":
    main()
