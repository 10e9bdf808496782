"""Commands of docs/tools.md: as documented, as run, why it is another, and its group."""

EXTRA = ".venv/bin/pip install --quiet --constraint constraints.txt --editable '.[trackers]'"
LIVE = ".venv/bin/rl-fn train policy --trackers tensorboard mlflow --system-every 10"
SHORT = (
    "--name live --sft.steps 2 --sft.rows-per-step 8 --policy.steps 2 --policy.prompts-per-step 4 --held-out 8 "
    "--checkpoint-every 1"
)
EXPORT = ".venv/bin/rl-fn export runs/quickstart --to"
COST = ".venv/bin/python experiments/benchmarks/tracker_cost.py --output"
TRACKERS: list[tuple[str, ...]] = [
    (LIVE, f"{EXTRA} && {LIVE} {SHORT}", "minutes; the libraries are an extra"),
    *((f"{EXPORT} {name}",) for name in ("tensorboard", "mlflow", "trackio", "wandb")),
    (f"{EXPORT} mlflow --artifacts files --again",),
    ("rl-fn export", "rl-fn export --help", "names no run"),
    (
        f"{COST} experiments/results/tracker_cost --rounds 3",
        f"{COST} $SCRATCH/tracker_cost --only tensorboard --steps 60",
        "ten minutes; the results are those of the repository",
        "tools",
    ),
]
TUNE = (
    ".venv/bin/rl-fn tune policy --space.optimizer.learning-rate log:1e-5..1e-3 --space.objective gspo,dapo "
    "--trials 16 --seeds 3 --parallel 2"
)
STUDY = "--trials 2 --seeds 1 --policy.evaluate-every 1 " + SHORT.removeprefix("--name live ")
OF_TUNE = ".venv/bin/python experiments/tuning.py"
PRUNING = f"{OF_TUNE} pruning"
TUNING: list[tuple[str, ...]] = [
    (TUNE, f"{TUNE} {STUDY}", "half an hour"),
    (".venv/bin/rl-fn tune report runs/tune",),
    (".venv/bin/rl-fn tune --help",),
    (
        f"{OF_TUNE} toy",
        f"{OF_TUNE} toy --seeds 1 --trials 6 --samplers random tpe --output $SCRATCH/tuning",
        "minutes; the results are those of the repository",
    ),
    (
        f"{OF_TUNE} quickstart",
        f"{OF_TUNE} quickstart --seeds 1 --trials 1 --samplers random tpe --steps 1 --confirm 1 --workers 2 "
        "--base='--sft.steps 2' --fixed='--policy.evaluate-every 1 --held-out 8' --runs $SCRATCH/studies "
        "--output $SCRATCH/tuning",
        "an hour; the results are those of the repository",
    ),
    (
        PRUNING,
        f"{PRUNING} --seeds 1 --trials 1 --steps 1 --base='--sft.steps 2' --fixed='--policy.evaluate-every 1 "
        "--held-out 8' --runs $SCRATCH/pruners --output $SCRATCH/tuning",
        "half an hour; the results are those of the repository",
    ),
]
AUTO = ".venv/bin/rl-fn train policy --micro-batch-tokens auto"
TABLE = ".venv/bin/python experiments/benchmarks/memory_plan.py --output"
POLICIES = ".venv/bin/python experiments/benchmarks/memory_policies.py --output"
MEMORY: list[tuple[str, ...]] = [
    (".venv/bin/rl-fn plan policy --micro-batch-tokens 4096 --fits 24GiB",),
    (".venv/bin/rl-fn plan preference --no-cache-reference --no-knobs",),
    (".venv/bin/rl-fn plan policy --workers 4 --mesh.tensor 2 --no-knobs",),
    (".venv/bin/rl-fn plan runs/addition",),
    (
        ".venv/bin/rl-fn plan policy --rollout.backend vllm --rollout.vllm.precision int8 "
        "--policy.recompute-old-logprobs --rollout.vllm.kv-cache-gib 0.1",
    ),
    (AUTO, f"{AUTO} {SHORT.replace('live', 'budget')}", "minutes"),
    (
        f"{TABLE} experiments/results/memory_plan --models qwen2 llama qwen3",
        f"{TABLE} $SCRATCH/memory_plan --models qwen2 --settings checkpointing",
        "minutes",
    ),
    (
        f"{TABLE} experiments/results/memory_plan_smollm2 --models smollm2 --settings plain "
        '"smaller micro-batches" checkpointing "bfloat16, checkpointing" "packed, no shared prefixes"',
        f"{TABLE} $SCRATCH/memory_plan_qwen3 --models qwen3 --settings plain",
        "6 GB; the results are those of the repository",
    ),
    (
        f"{POLICIES} experiments/results/memory_policies --threads 2",
        f"{POLICIES} $SCRATCH/policies --models qwen2 --steps 1 --knobs 'activations keep' 'activations full'",
        "five minutes, 6 GB; SmolLM2 is an extra",
    ),
    (
        ".venv/bin/rl-fn train policy --memory",
        f".venv/bin/rl-fn train policy --memory {SHORT.replace('live', 'profiled')}",
        "minutes",
    ),
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
    ("make test-tools", "make test-tools TESTS=tests/bridge/tools/export", "minutes", "tools"),
    (
        'pip install ".[tune]"',
        'pip install --quiet --dry-run --constraint constraints.txt ".[tune]"',
        "of the clone, into no environment",
    ),
    (
        'pip install ".[trackers]"',
        'pip install --quiet --dry-run --constraint constraints.txt ".[trackers]"',
        "of the clone, into no environment",
    ),
    *TRACKERS,
    *TUNING,
    *MEMORY,
    *REPORTS,
]
