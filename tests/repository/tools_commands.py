"""Commands of docs/tools.md: as documented, as run, why it is another, and its group."""

EXTRA = ".venv/bin/pip install --quiet --constraint constraints.txt --editable '.[trackers]'"
LIVE = ".venv/bin/rl-fn train policy --trackers tensorboard mlflow --system-every 10"
SHORT = (
    "--name live --sft.steps 2 --sft.rows-per-step 8 --policy.steps 2 --policy.prompts-per-step 4 --held-out 8 "
    "--checkpoint-every 1"
)
EXPORT = ".venv/bin/rl-fn export runs/quickstart --to"
TRACKERS: list[tuple[str, ...]] = [
    (LIVE, f"{EXTRA} && {LIVE} {SHORT}", "minutes; the libraries are an extra"),
    *((f"{EXPORT} {name}",) for name in ("tensorboard", "mlflow", "trackio", "wandb")),
    (f"{EXPORT} mlflow --artifacts files --again",),
    ("rl-fn export", "rl-fn export --help", "names no run"),
]
TUNING: list[tuple[str, ...]] = []
MEMORY: list[tuple[str, ...]] = [
    (".venv/bin/rl-fn plan policy --micro-batch-tokens 4096 --fits 24GiB",),
    (".venv/bin/rl-fn plan runs/quickstart",),
]
REPORT = ".venv/bin/rl-fn report runs/quickstart"
SEEDS = "experiments/results/quickstart/seed1 experiments/results/quickstart/seed2 --title Quickstart"
REPORTS: list[tuple[str, ...]] = [
    (REPORT,),
    (f"{REPORT} --watch",),
    (f"{REPORT} {SEEDS} --output report.html",),
    (
        f".venv/bin/rl-fn report runs/seed0 {SEEDS} --output experiments/results/quickstart/report.html",
        f"{REPORT} {SEEDS} --output $CLONE/runs/quickstart.html",
        "the run of seed 0 is the quickstart's; what is committed stays",
    ),
    ("rl-fn report", "rl-fn report --help", "names no run"),
]
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
