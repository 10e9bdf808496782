"""One whole GRPO step, and the update alone, against TRL's GRPOTrainer: tokens/s, CPU seconds, peak memory, reward.

.venv-peers/bin/python experiments/benchmarks/whole_step.py      # about 12 minutes on two quiet cores
.venv-peers/bin/python experiments/benchmarks/whole_step.py --vllm .venv-vllm/bin/python --models smollm2

With ``--vllm`` a third side is ours with vLLM, in the environment of that interpreter. TRL 1.16 cannot train with vLLM
on a CPU: its update loads tensor by tensor, and vLLM's CPU layers have no loaders any more then. The reward is measured
where the tiny model is, for the other does not learn within seconds.

The sides take turns in processes of their own, on the same model, prompts, reward, objective, precision and threads.
A step's tokens are those of its prompts and completions, without padding. The first step of a process is warm-up.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from rl_bridge.common.files import replacing, write_json

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "whole_step"
SIDES = ("ours", "trl")
NAMES = {"ours": "rl_fn", "vllm": "rl_fn, vLLM", "trl": "TRL"}
PACKAGES = ("rl-fn", "torch", "transformers", "jax", "trl")
STEPS = {"tiny": 8, "smollm2": 2}
PARTS = ("generation", "trunk", "head", "optimizer", "python")


def run(file: str, *words: Any, timeout: float, python: str = sys.executable) -> str:
    """What a process of one of the other two files prints; its errors stop the benchmark."""
    command = [python, str(HERE / file), *map(str, words)]
    environment = {**os.environ, **QUIET, **VLLM_ENVIRONMENT}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


QUIET = {"JAX_PLATFORMS": "cpu", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
VLLM_ENVIRONMENT = {"VLLM_CPU_CI_ENV": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
VLLM_ENVIRONMENT |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def side(name: str, model: str, folder: Path, options: argparse.Namespace, *words: Any) -> dict[str, Any]:
    """Measurements of one process."""
    shared = ["--threads", options.threads, *(["--prompts", options.prompts] if options.prompts else [])]
    python = options.vllm if name == "vllm" else sys.executable
    of = ["ours", model, folder, "--rollout", "vllm"] if name == "vllm" else [name, model, folder]
    printed = run("whole_step_sides.py", *of, *shared, *words, timeout=options.timeout, python=python)
    return json.loads(printed.strip().splitlines()[-1])


def measured(model: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides of a model, in turns."""
    sides = ("ours", "vllm", "trl") if options.vllm else SIDES
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for turn in range(options.turns):
        for name in sides if turn % 2 == 0 else sides[::-1]:
            words = ["--steps", options.steps or STEPS[model], "--passes", options.passes]
            words += ["--micro-batch-tokens", options.micro_batch_tokens]
            last = name == "ours" and turn == options.turns - 1
            found[name].append(side(name, model, folder, options, *words, *(["--profile"] if last else [])))
            print(f"{model}, turn {turn + 1}, {NAMES[name]}: {summary(found[name])}", flush=True)
    return {name: summary(of) | {"processes": of} for name, of in found.items()}


def summary(processes: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps of all processes but their first ones."""

    def steps(name: str) -> list[float]:
        return [value for process in processes for value in process["steps"][name][1:]]

    wall, sampling, tokens = steps("wall"), steps("sampling"), steps("tokens")
    update = [a - b for a, b in zip(wall, sampling, strict=True)]
    return {
        "tokens_per_second": statistics.median(t / s for t, s in zip(tokens, wall, strict=True)),
        "update_tokens_per_second": statistics.median(t / s for t, s in zip(tokens, update, strict=True)),
        "step_seconds": statistics.median(wall),
        "generation_seconds": statistics.median(sampling),
        "update_seconds": statistics.median(update),
        "cpu_seconds": statistics.median(steps("cpu")),
        "peak_mib": max(process["peak_kib"] for process in processes) / 1024,
        "above_imports_mib": max(process["peak_kib"] - process["before_kib"] for process in processes) / 1024,
        "tokens": statistics.median(tokens),
        "steps": len(wall),
    }


def where(of: dict[str, Any]) -> dict[str, float]:
    """Parts of our step's time: generation measured, the update cut as the profiler saw it."""
    parts = of["processes"][-1]["parts"]
    step, update = of["step_seconds"], of["update_seconds"]
    shares = {name: parts[name] * update / step for name in PARTS[1:]}
    return {"generation": 1.0 - update / step, **shares}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    facts = result["facts"]
    lines = [
        "# One GRPO step against TRL's GRPOTrainer\n",
        f"{facts['hardware']}, {facts['threads']} threads, load {facts['load']:.1f} at the start; {facts['date']}; "
        + ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
        + ". float32, no activation checkpointing; medians of the steps after each process's first.",
        "Tokens are those of prompts and completions, without padding. Memory is the process's peak, and in brackets",
        f"what of that came after its imports. TRL's step: {facts['passes']} passes; rl_fn's micro-batches: at most",
        f"{facts['micro_batch_tokens']} tokens.\n",
        "| model | | tokens/s of a step | tokens/s of the update | CPU s a step | peak memory (MiB) |",
        "|---|---|---|---|---|---|",
    ]
    for model, of in result["models"].items():
        for name, row in of.items():
            memory = f"{row['peak_mib']:.0f} ({row['above_imports_mib']:.0f})"
            speeds = f"{row['tokens_per_second']:.0f} | {row['update_tokens_per_second']:.0f}"
            lines.append(f"| {model} | {NAMES[name]} | {speeds} | {row['cpu_seconds']:.2f} | {memory} |")
        for name in [side for side in of if side != "trl"]:
            ratios = [f"{of[name][k] / of['trl'][k]:.2f} ×" for k in ("tokens_per_second", "update_tokens_per_second")]
            below = [f"{of[name][k] / of['trl'][k]:.2f} ×" for k in ("cpu_seconds", "peak_mib", "above_imports_mib")]
            lines.append(
                f"| {model} | {NAMES[name]} / TRL | {' | '.join([*ratios, below[0]])} | {below[1]} ({below[2]}) |"
            )
    lines += ["\n## Where a step's time goes (rl_fn)\n", f"| model | {' | '.join(PARTS)} |", "|---" * 6 + "|"]
    for model, of in result["models"].items():
        shares = where(of["ours"])
        lines.append(f"| {model} | {' | '.join(f'{100 * shares[name]:.0f} %' for name in PARTS)} |")
    if result["reward"]:
        lines += [f"\n## Reward after {facts['seconds']:.0f} seconds of training, {facts['reward_model']}\n"]
        lines += ["| | steps | mean reward of the last five |", "|---|---|---|"]
    for name, side in result["reward"].items():
        steps = side["steps"]
        lines.append(f"| {NAMES[name]} | {len(steps['reward'])} | {statistics.mean(steps['reward'][-5:]):.3f} |")
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Ratios of speed and memory, and the reward over time where it was measured."""
    figure, axes = plt.subplots(1, 1 + bool(result["reward"]), figsize=(10, 3.6), layout="constrained", squeeze=False)
    bars = axes[0, 0]
    models = result["models"]
    kinds = {"tokens_per_second": "step", "update_tokens_per_second": "update", "peak_mib": "memory"}
    sides = {f"{model}, {NAMES[name]}": (of[name], of["trl"]) for model, of in models.items() for name in of}
    sides = {label: pair for label, pair in sides.items() if pair[0] is not pair[1]}
    for offset, (key, label) in enumerate(kinds.items()):
        of = [ours[key] / trl[key] for ours, trl in sides.values()]
        bars.bar([i + 0.27 * offset for i in range(len(of))], of, 0.25, label=label)
    bars.axhline(1.0, color="black", linewidth=1)
    bars.set_xticks([i + 0.27 for i in range(len(sides))], list(sides))
    bars.set_ylabel("over TRL")
    bars.legend()
    for name, side in result["reward"].items():
        curve = axes[0, 1]
        curve.plot(side["steps"]["end"], side["steps"]["reward"], label=NAMES[name])
        curve.set(xlabel="seconds of training", ylabel="mean reward of the step")
        curve.legend()
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def vllm_version(python: str | None) -> dict[str, str]:
    """Of the environment of ``python``."""
    if python is None:
        return {}
    asked = "import vllm; print(vllm.__version__)"
    said = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True, timeout=120)
    return {"vllm": said.stdout.split()[-1]}


def hardware() -> str:
    """The processor and its cores."""
    lines = [line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if "model name" in line]
    return f"{lines[0].split(':')[1].strip() if lines else platform.processor()}, {os.cpu_count()} cores"


def main() -> None:
    """Measure, and write the three files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(STEPS), default=list(STEPS))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of a process, the first of them warm-up")
    parser.add_argument("--prompts", type=int, help="prompts of a step, fewer than the setting has")
    parser.add_argument("--passes", type=int, default=1, help="TRL's gradient accumulation steps")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=45.0, help="of training for the reward")
    parser.add_argument("--updates", type=int, default=150, help="of the tiny model's supervision")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one process")
    parser.add_argument("--vllm", help="the Python of an environment with vLLM, for a third side")
    parser.add_argument("--output", type=Path, help="results/whole_step, or whole_step_vllm")
    options = parser.parse_args()
    options.output = options.output or RESULTS.with_name("whole_step_vllm" if options.vllm else "whole_step")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        words = ["--updates", options.updates, "--threads", options.threads]
        run("whole_step_models.py", folder, *options.models, *words, timeout=options.timeout)
        models = {model: measured(model, folder, options) for model in options.models}
        longest = ["--steps", 400, "--seconds", options.seconds, "--reward", "exact"]
        learns = SIDES if "tiny" in options.models else ()
        reward = {name: side(name, "tiny", folder, options, *longest) for name in learns}
    facts = {
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "load": load,
        "versions": {name: version(name) for name in PACKAGES} | vllm_version(options.vllm),
        "reward_model": "tiny",
        **{name: getattr(options, name) for name in ("threads", "passes", "micro_batch_tokens", "turns", "seconds")},
    }
    result = {"facts": facts, "models": models, "reward": reward}
    write_json(options.output / "results.json", result)
    with replacing(options.output / "table.md") as path:
        path.write_text(table(result), encoding="utf-8")
    with replacing(options.output / "plot.png") as path:
        plot(result, path)
    print(table(result))


if __name__ == "__main__":
    main()
