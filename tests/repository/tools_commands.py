"""Commands of docs/tools.md: as documented, as run, why it is another, and its group."""

TRACKERS: list[tuple[str, ...]] = []
TUNING: list[tuple[str, ...]] = []
MEMORY: list[tuple[str, ...]] = []
REPORTS: list[tuple[str, ...]] = []
TOOLS: list[tuple[str, ...]] = [
    ("make install-tools", "make install-tools", "minutes", "tools"),
    ("make test-tools", "make test-tools TESTS=tests/bridge/tracking", "minutes", "tools"),
    (
        'pip install "rl-fn[tune]"',
        'pip install --quiet --dry-run --constraint constraints.txt ".[tune]"',
        "of the clone, into no environment",
    ),
    (
        'pip install "rl-fn[trackers]"',
        'pip install --quiet --dry-run --constraint constraints.txt ".[trackers]"',
        "of the clone, into no environment",
    ),
    *TRACKERS,
    *TUNING,
    *MEMORY,
    *REPORTS,
]
