"""What the loop's objects cost: a step of GRPO with them, over the same step with the engines that lie beneath.

    .venv/bin/python experiments/benchmarks/loop_cost.py    # writes experiments/results/loop_cost/

Three sides train a new Qwen2 from the same weights on the same prompts: engines alone, which are called as
docs/engines.md shows; ``Rollout``, ``Groups`` and ``Policy``; and these in a ``Run`` that logs each step. They take
turns step by step in one process, each time in another order, so that a drift of the machine is everybody's. All must
have the gradient's norm of the others to the bit: the work is the same. Ctrl-C keeps the steps that all sides have.
``--sizes`` measures some of the models, beside what the file has of others; without any it is drawn again.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

import rl_fn
from experiments.machine import facts
from rl_bridge import AdamW, Model, Policy, Rollout, Run, SamplingParams, current_executor, init
from rl_bridge.common.files import replacing, write_json
from rl_bridge.data.token_batch import collate
from rl_bridge.engines import Mesh, NeedParallel
from rl_bridge.functional import from_jax
from rl_bridge.loop.changes import changed
from rl_bridge.models.small import TinySource, character_tokenizer
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.pipelines.placement import Engines
from rl_bridge.pipelines.rollout_options import RolloutOptions

OUT = Path(__file__).parents[1] / "results" / "loop_cost"
ENGINES, OBJECTS, LOGGED = "engines", "objects", "objects in a run"
SIZES: dict[str, dict[str, int]] = {
    "1M": {"hidden": 128, "layers": 4, "heads": 4, "prompts": 48, "n": 16, "tokens": 8, "steps": 60},
    "25M": {"hidden": 512, "layers": 8, "heads": 8, "prompts": 8, "n": 8, "tokens": 32, "steps": 16},
}
"""Parameters of a model → its width and the size of a step: the quickstart's, and one whose steps take seconds."""
PROBLEMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 100) for b in range(10, 100)]
OPTIMIZER = AdamW(1e-6, warmup=0)
"""A rate at which the model stays nearly as it is: once it has learned the reward, a step has no update."""
WARM_UP = 3
"""First steps of each side, which are not counted."""

Step = Callable[[Sequence[dict[str, Any]], SamplingParams], float]
"""One step on these rows, and the norm of its gradient."""


def reward(completion: str, row: dict[str, Any]) -> float:
    """A number that differs within nearly every group, so that every row has a gradient."""
    return zlib.crc32(completion.encode()) % 11 / 10


def of_engines(model: Model, objective: rl_fn.Objective) -> Step:
    """A step of the engines, the objective's functions through ``from_jax``."""
    engines = Engines(init(), Mesh(), model.source, ParallelConfig(), run="beneath")
    rollout = engines.rollout(model.tokenizer, RolloutOptions())
    policy = engines.policy(OPTIMIZER, objective, updates=OPTIMIZER.updates, scoring=ScoringConfig())
    advantages_of, selection_of = from_jax(objective.advantages), from_jax(objective.selection)
    denominator_of = from_jax(objective.denominator)

    def step(rows: Sequence[dict[str, Any]], sampling: SamplingParams) -> float:
        policy.sync_weights(rollout)
        drawn = rollout.generate([row["prompt"] for row in rows], sampling)
        numbers = [reward(one.completion, rows[place // sampling.n]) for place, one in enumerate(drawn)]
        batch = collate(drawn, model.pad_token)
        of_group: Any = (torch.tensor(numbers).view(len(rows), -1), batch.mask.view(len(rows), sampling.n, -1))
        rollouts = rl_fn.Rollouts(*of_group)
        advantages = advantages_of(rollouts).advantages
        computed, counted = selection_of(rollouts, advantages)
        batch = batch._replace(advantages=advantages.flatten(0, 1), old_logprobs=batch.rollout_logprobs)
        policy.train_step(NeedParallel(batch.rows(computed.flatten())), float(denominator_of(counted.flatten(0, 1))))
        return policy.optimizer_step()["grad_norm"]

    return step


def of_objects(model: Model, objective: rl_fn.Objective, log: Callable[[Any, Any], None] = lambda *_: None) -> Step:
    """A step as a loop of one's own has it; ``log`` gets the update and the groups."""
    rollout, policy = Rollout(model), Policy(model, objective, OPTIMIZER)

    def step(rows: Sequence[dict[str, Any]], sampling: SamplingParams) -> float:
        policy.sync_weights(rollout)
        groups = rollout.generate(rows, sampling).score(reward)
        update = policy.update(groups.batch().with_advantages(objective))
        log(update, groups)
        return update["grad_norm"]

    step.policy = policy  # type: ignore[attr-defined]
    return step


def of_run(model: Model, objective: rl_fn.Objective, folder: Path, steps: int, entered: ExitStack) -> Step:
    """The same, each step within those of a run, which logs it and writes some completions."""
    runs: list[Run] = []
    inner = of_objects(model, objective, lambda *measured: runs[0].log(*measured))
    run = Run("loop", state=[inner.policy], output=folder, checkpoint_every=10**6)  # type: ignore[attr-defined]
    runs.append(entered.enter_context(run))
    numbers = run.steps(steps + 1)
    next(numbers)

    def step(rows: Sequence[dict[str, Any]], sampling: SamplingParams) -> float:
        changed.clear()  # by the other sides, whose models are no part of this run
        norm = inner(rows, sampling)
        next(numbers)
        return norm

    return step


def measured(size: dict[str, int], folder: Path) -> dict[str, dict[str, list[float]]]:
    """Seconds of every step of each side, by the clock and of the processor."""
    tokenizer = character_tokenizer("0123456789+=")
    widths = {name: size[name] for name in ("hidden", "layers", "heads")}
    model = Model(TinySource.for_tokenizer(tokenizer, **widths), tokenizer)
    objective, total = rl_fn.recipes.grpo().replace(kl=None), size["steps"] + WARM_UP
    sides = {ENGINES: of_engines(model, objective), OBJECTS: of_objects(model, objective)}
    numbers, names = random.Random(0), [*sides, LOGGED]
    seconds: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in names}
    try:
        with ExitStack() as entered:
            sides[LOGGED] = of_run(model, objective, folder, total, entered)
            for number in tqdm(range(total), desc="steps"):
                rows = numbers.sample(PROBLEMS, size["prompts"])
                sampling = SamplingParams(n=size["n"], max_new_tokens=size["tokens"], seed=number)
                norms = {}
                for place in range(len(names)):
                    name = names[(place + number) % len(names)]
                    wall, cpu = time.perf_counter(), time.process_time()
                    norms[name] = sides[name](rows, sampling)
                    seconds[name]["cpu"].append(time.process_time() - cpu)
                    seconds[name]["wall"].append(time.perf_counter() - wall)
                if len(set(norms.values())) != 1:
                    raise RuntimeError(f"step {number}: the sides did not do the same work, norms {norms}")
    except KeyboardInterrupt:
        print("stopped: the steps that all sides have are kept", file=sys.stderr)
    finally:
        current_executor().stop()
    whole = min(len(each["wall"]) for each in seconds.values())
    if whole <= WARM_UP:
        raise SystemExit("stopped before a step that counts: nothing is written")
    return {name: {kind: each[kind][WARM_UP:whole] for kind in each} for name, each in seconds.items()}


def ratio(seconds: dict[str, dict[str, list[float]]], side: str, kind: str) -> dict[str, float]:
    """The median over steps of a side's time over that of the engines, with the 95 % interval of a bootstrap."""
    pairs = np.array(seconds[side][kind]) / np.array(seconds[ENGINES][kind])
    draws = np.random.default_rng(0).integers(len(pairs), size=(2000, len(pairs)))
    low, high = np.quantile(np.median(pairs[draws], axis=1), [0.025, 0.975])
    return {"ratio": float(np.median(pairs)), "low": float(low), "high": float(high)}


def described(size: dict[str, int], seconds: dict[str, dict[str, list[float]]], threads: int) -> dict[str, Any]:
    """All that one model's rows of the table and its plot are drawn from."""
    ratios = {side: {kind: ratio(seconds, side, kind) for kind in ("wall", "cpu")} for side in (OBJECTS, LOGGED)}
    medians = {side: {kind: statistics.median(each[kind]) for kind in each} for side, each in seconds.items()}
    size = {**size, "steps": len(seconds[ENGINES]["wall"]), "threads": threads}
    return {**facts(), **size, "median": medians, "over_engines": ratios, "seconds": seconds}


def table(results: dict[str, dict[str, Any]]) -> str:
    """One line a model and side."""
    lines = [
        "# What the loop's objects cost",
        "",
        "A step over the same step of the engines alone: the median over steps and its 95 % interval. The gradients'",
        "norms are equal to the bit.",
        "",
        "| parameters | side | s a step | CPU s a step | times engines | times engines, CPU |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        for side, median in result["median"].items():
            cells = [name, side, f"{median['wall']:.3f}", f"{median['cpu']:.3f}"]
            for kind in ("wall", "cpu"):
                over = result["over_engines"].get(side, {}).get(kind)
                cells.append("1" if over is None else f"{over['ratio']:.3f} ({over['low']:.3f} to {over['high']:.3f})")
            lines.append(f"| {' | '.join(cells)} |")
    for name, result in results.items():
        step = f"{result['prompts']} prompts of {result['n']} completions of {result['tokens']} tokens"
        machine = f"{result['processor']}, {result['threads']} threads, load {result['load']} at the end"
        versions = f"torch {result['versions']['torch']}, {result['date']}"
        lines += ["", f"{name}: {result['steps']} steps of each side, {step};", f"{machine}; {versions}."]
    return "\n".join([*lines, "", "![Seconds of each step, by side](loop_cost.png)", ""])


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Seconds of each step over those of the engines."""
    figure = Figure(figsize=(4.5 * len(results), 3.2), layout="constrained")
    for axes, (name, result) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        for side in (OBJECTS, LOGGED):
            pairs = zip(result["seconds"][side]["wall"], result["seconds"][ENGINES]["wall"], strict=True)
            axes.plot([each / beneath for each, beneath in pairs], label=side, linewidth=1)
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set(title=f"{name} parameters", xlabel="step", ylabel="seconds over those of engines")
        axes.legend()
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=120)


def main() -> None:
    """Measure, and write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=list(SIZES), help="of the models")
    parser.add_argument("--steps", type=int, help="of each side, in place of a size's own")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    file = options.output / "loop_cost.json"
    results = json.loads(file.read_text("utf-8")) if file.exists() else {}
    for name in options.sizes:
        size = SIZES[name] | ({} if options.steps is None else {"steps": options.steps})
        with tempfile.TemporaryDirectory() as folder:
            results[name] = described(size, measured(size, Path(folder)), options.threads)
        options.output.mkdir(parents=True, exist_ok=True)
        write_json(file, results)
    results = {name: results[name] for name in SIZES if name in results}
    (options.output / "README.md").write_text(table(results), encoding="utf-8")
    draw(results, options.output / "loop_cost.png")
    print(table(results))


if __name__ == "__main__":
    main()
