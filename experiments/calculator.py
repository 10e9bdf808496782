"""A task that needs its tool: products of two-digit numbers, with a calculator and with a disconnected one.

python experiments/calculator.py    # writes experiments/results/calculator/{result.json,curves.png,table.md}

A tiny model first imitates conversations of which few call the calculator and most guess, then talks to it under
GRPO. The runs with and without the tool are alike but for the calculator's answers.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import calculator_tool
from experiments.calculator_tool import Calculator, Disconnected, demonstration, product_row
from rl_bridge.algorithms.policy_setup import PolicyConfig
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.models.pretrained import save_pretrained
from rl_bridge.models.small import character_tokenizer, tiny_qwen2
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.pipelines.objective_options import objective_options
from rl_train.policy import run_policy
from rl_train.policy_options import PolicyPipeline
from rl_train.sft import SFTPipeline, run_sft

OUT = Path(__file__).parent / "results" / "calculator"
DEMONSTRATIONS, SHARE = 1000, 0.3  # of which so many call the tool
WITH = {"tool": Calculator, "no tool": Disconnected}


def conversations(folder: Path, seed: int) -> None:
    """demonstrations.jsonl, problems.jsonl and held_out.jsonl, with no product in two of them."""
    choice = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    choice.shuffle(pairs)
    demonstrated, rest = pairs[:DEMONSTRATIONS], pairs[DEMONSTRATIONS:]

    def shown(a: int, b: int) -> dict[str, Any]:
        if choice.random() < SHARE:
            return demonstration(a, b)
        guess = str(choice.randrange(100, 9802))
        return {"messages": [{"role": "user", "content": f"{a}*{b}?"}, {"role": "assistant", "content": guess}]}

    files = {
        "demonstrations": [shown(a, b) for a, b in demonstrated],
        "problems": [product_row(a, b) for a, b in rest[200:]],
        "held_out": [product_row(a, b) for a, b in rest[:200]],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def warm_start(folder: Path, seed: int, steps: int, threads: int) -> Path:
    """The model after supervised fine-tuning on the demonstrations."""
    tokenizer = character_tokenizer("0123456789*?[]=;")
    save_pretrained(folder / "new", tiny_qwen2(tokenizer, hidden=64, layers=2, heads=4, seed=seed), tokenizer)
    run_sft(
        SFTPipeline(
            name="sft",
            output=folder,
            seed=seed,
            model=str(folder / "new"),
            data=str(folder / "demonstrations.jsonl"),
            held_out=50,
            apply_chat_template=False,
            steps=steps,
            rows_per_step=64,
            optimizer=OptimizerConfig(learning_rate=3e-3, beta2=0.99),
            threads=threads,
        )
    )
    return folder / "sft" / "model"


def pipeline(folder: Path, name: str, model: Path, seed: int, steps: int, threads: int) -> PolicyPipeline:
    """Reinforcement learning in conversations with one of the two calculators."""
    return PolicyPipeline(
        name=name.replace(" ", "-"),
        output=folder,
        seed=seed,
        model=str(model),
        data=str(folder / "problems.jsonl"),
        eval_data=str(folder / "held_out.jsonl"),
        environment=f"{calculator_tool.__file__}:{WITH[name].__name__}",
        max_turns=3,
        policy=PolicyConfig(
            steps=steps,
            prompts_per_step=16,
            updates_per_step=2,
            evaluate_every=5,
            sampling=SamplingParams(n=8, max_new_tokens=10),
        ),
        optimizer=OptimizerConfig(learning_rate=5e-4, warmup=3, decay="constant", beta2=0.95),
        objective=objective_options("dapo"),
        track_kl=False,
        threads=threads,
    )


def records(folder: Path) -> list[dict[str, Any]]:
    """What every step of reinforcement learning logged."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["stage"] == "policy" and "reward" in record]


def run(folder: Path, seeds: Sequence[int], steps: int, sft_steps: int, threads: int) -> list[dict[str, Any]]:
    """One entry a seed and calculator: the curves, and the held-out accuracy before and after."""
    found = []
    for seed in seeds:
        mine = folder / f"seed{seed}"
        conversations(mine, seed)
        model = warm_start(mine, seed, sft_steps, threads)
        for name in WITH:
            config = pipeline(mine, name, model, seed, steps, threads)
            summary = run_policy(config)
            steps_logged = records(mine / config.name)
            found.append(
                {
                    "seed": seed,
                    "calculator": name,
                    "reward": [record["reward"] for record in steps_logged],
                    "turns": [record.get("turns", 1.0) for record in steps_logged],
                    "held_out": {r["step"] + 1: r["held_out"] for r in steps_logged if "held_out" in r},
                    "sampled_before": summary["sampled_before"],
                    "sampled_after": summary["sampled_after"],
                    "before": summary["accuracy_before"],
                    "after": summary["accuracy_after"],
                    "seconds": summary["seconds"],
                }
            )
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Held-out accuracy of 200 products, by calculator: the mean over seeds and each seed."""
    lines = [
        "| calculator | before, sampled | after, sampled | before, greedy | after, greedy |",
        "|---|---|---|---|---|",
    ]
    for name in WITH:
        mine = [run for run in found if run["calculator"] == name]
        cells = []
        for when in ("sampled_before", "sampled_after", "before", "after"):
            values = [run[when] for run in mine]
            cells.append(f"{np.mean(values):.2f} ({', '.join(f'{value:.2f}' for value in values)})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Reward and turns a step: the mean of the seeds, and a band from the lowest to the highest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2)
    for name in WITH:
        for axis, metric in zip(axes, ("reward", "turns"), strict=True):
            curves = np.array([run[metric] for run in found if run["calculator"] == name])
            steps = np.arange(1, curves.shape[1] + 1)
            axis.plot(steps, curves.mean(0), label=name)
            axis.fill_between(steps, curves.min(0), curves.max(0), alpha=0.25)
            axis.set(xlabel="step", ylabel=metric)
    axes[0].set_ylim(0, 1)
    axes[0].legend()
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sft-steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/calculator"), help="folder of the runs themselves")
    parser.add_argument("--output", type=Path, default=OUT)
    options = parser.parse_args()
    found = run(options.runs, options.seeds, options.steps, options.sft_steps, options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    result = {
        "command": "python experiments/calculator.py",
        "config": {name: value for name, value in vars(options).items() if name not in ("runs", "output")},
        "demonstrations": DEMONSTRATIONS,
        "share_with_calls": SHARE,
        "runs": found,
    }
    (options.output / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    (options.output / "table.md").write_text(table(found), encoding="utf-8")
    plot(found, options.output / "curves.png")
    print(table(found))


if __name__ == "__main__":
    main()
