"""Regret of the samplers of rl-fn tune against random search, five seeds each: on a toy, and on the quickstart.

python experiments/tuning.py toy           # writes experiments/results/tuning/toy.json and toy.png, in minutes
python experiments/tuning.py quickstart    # learning rate × group size × clip, in an hour; goes on where it was stopped
python experiments/tuning.py pruning       # the same task without a pruner, with paired, with asha: tuning_pruning.py

All samplers of a part get the same number of trials, and every trial costs the same: groups of another size are of as
many completions. The choice of a study is its best trial by what was measured, which is noisy. Its regret is what is
lost against the optimum by the choice's true value: on the toy from the formula, on the quickstart from runs with fresh
seeds, against the best of all studies.
"""

import argparse
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import tuning_pruning
from rl_bridge.common.files import replacing, write_json
from rl_bridge.common.statistics import confidence_interval
from rl_tools import cli
from rl_tools.trainer_options import TRAINERS, load, options_of
from rl_tools.tune.goals import parse_goal
from rl_tools.tune.samplers import SAMPLERS, FunctionSampler, OptunaSampler, Result
from rl_tools.tune.scheduler import Plan
from rl_tools.tune.space import Choice, Interval, Parameter, Space, words_of
from rl_tools.tune.study import Study, places, run_study, training_command
from rl_tools.tune.study_report import read_study, summary_of

RESULTS = Path(__file__).parent / "results/tuning"
TOY = Space(
    (
        Parameter("recipe", Choice(("a", "b", "c"))),
        Parameter("rate", Interval(1e-6, 1e-2, log=True)),
        Parameter("group", Interval(2, 64, log=True, whole=True)),
        Parameter("clip", Interval(0.0, 1.0)),
        Parameter("beta", Interval(0.0, 1.0), ("recipe", ("b",))),
    )
)
NOISE = 0.05
"""Standard deviation of a toy's reward from seed to seed; a trial has three."""
FIXED = "--policy.updates-per-step 2 --policy.evaluate-every {every} --optimizer.warmup 10 --threads 1"
FIXED += " --policy.sampling.max-new-tokens 5 --optimizer.decay linear --optimizer.final 0.2 --optimizer.beta2 0.99"
SPACE = {
    "optimizer.learning-rate": "log:1e-5..1e-2",
    "policy.sampling.n+policy.prompts-per-step": "2+96,4+48,8+24,16+12",
    "objective.clip-high": "log:0.02..1",
}
BASE = "--sft.steps 135 --sft.rows-per-step 256 --optimizer.learning-rate 2e-3 --optimizer.warmup 50 --threads 1"
"""The supervised model that every trial begins with; the quickstart's warm start, made once."""


def reward(values: Mapping[str, Any]) -> float:
    """The toy's true reward; 1 at recipe b, rate 10⁻⁴, group 16, clip 0.3, beta 0.7.

    Too large a rate is worse than one too small by as much, and a recipe has a value of its own.
    """
    rate = math.log10(values["rate"]) + 4
    lost = 0.25 * rate**2 * (2 if rate > 0 else 1) + 0.05 * math.log2(values["group"] / 16) ** 2
    lost += 1.5 * (values["clip"] - 0.3) ** 2 + {"a": 0.15, "b": 0.0, "c": 0.3}[values["recipe"]]
    lost += (values.get("beta", 0.7) - 0.7) ** 2
    return math.exp(-lost)


def toy_study(sampler: str, seed: int, trials: int) -> list[float]:
    """Regret of the choice after each trial."""
    made, noise = OptunaSampler(sampler, TOY, seed, grid_points=3), np.random.default_rng([seed, 1])
    measured, regrets, true = [], [], []
    for number in range(trials):
        values = made.ask(number)
        if values is None:
            regrets.append(regrets[-1])
            continue
        true.append(reward(values))
        measured.append(float(np.mean(true[-1] + NOISE * noise.standard_normal(3))))
        made.tell(number, Result("complete", (-measured[-1],)))
        regrets.append(1.0 - true[int(np.argmax(measured))])
    return regrets


def toy(arguments: argparse.Namespace) -> None:
    """All samplers, seeds beside one another in processes."""
    jobs = [(name, seed) for name in arguments.samplers for seed in range(arguments.seeds)]
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        futures = {job: pool.submit(toy_study, *job, arguments.trials) for job in jobs}
        found = {job: future.result() for job, future in futures.items()}
    regret = {name: [found[name, seed] for seed in range(arguments.seeds)] for name in arguments.samplers}
    about = {"trials": arguments.trials, "seeds_of_a_trial": 3, "noise": NOISE}
    write(arguments.output, "toy", about, regret, "true reward lost by the choice")


def fixed_words(arguments: argparse.Namespace, every: int) -> list[str]:
    """What all trials of the quickstart have in common, with the model that they begin with; it is made once."""
    base = (arguments.runs / "base").resolve()
    words = ["--name", "base", "--output", str(base.parent), *(["--resume"] if base.exists() else [])]
    if not (base / "model").exists() and cli.main(["train", "sft", *words, *BASE.split(), *arguments.base.split()]):
        sys.exit("the supervised model was not made")
    fixed = f"--model {base / 'model'} --sft.steps 0 {FIXED.format(every=every)} --policy.steps {arguments.steps}"
    return [*fixed.split(), *arguments.fixed.split()]


def pruning(arguments: argparse.Namespace) -> None:
    """Studies of the same trials with each pruner."""
    fixed = fixed_words(arguments, every=4)
    about = {"trials": arguments.trials, "steps": arguments.steps, "seeds_of_a_trial": tuning_pruning.SEEDS}
    about |= {"space": tuning_pruning.SPACE, "pruners": tuning_pruning.OPTIONS, "fixed": shlex.join(fixed[2:])}
    sizes = {"studies": arguments.seeds, "trials": arguments.trials, "workers": arguments.workers}
    tuning_pruning.write(arguments.output, about, tuning_pruning.run_studies(arguments.runs, fixed, **sizes))


def quickstart(arguments: argparse.Namespace) -> None:
    """Studies of rl-fn tune, one after another, and then the choices with fresh seeds."""
    runs, done = arguments.runs, {}
    fixed = fixed_words(arguments, every=20)
    for seed in range(arguments.seeds):
        for name in arguments.samplers:
            folder = runs / f"{name}-{seed}"
            words = [f"--space.{option}={domain}" for option, domain in SPACE.items()]
            words += f"--sampler {name} --sampler-seed {seed} --trials {arguments.trials}".split()
            words += f"--first-seed {seed} --parallel {arguments.workers} --maximize held_out".split()
            words += ["--name", folder.name, "--output", str(runs), *(["--resume"] if folder.exists() else [])]
            if cli.main(["tune", "policy", *words, *fixed]):
                sys.exit(f"the study {folder.name} did not come to its end; the same command goes on")
            done[name, seed] = summary_of(read_study(folder))
    options = options_of(load(TRAINERS["policy"].default)())
    chosen = [found["trials"][found["best"]["trial"]]["assignment"] for found in done.values()]
    confirming = Study(
        runs / "confirmed",
        Plan(
            (parse_goal("held_out", maximize=True),),
            trials=len(chosen),
            seeds=arguments.confirm,
            slots=arguments.workers,
        ),
        {"space": "the choices", "goals": [{"name": "held_out", "maximize": True}], "chosen": chosen, "fixed": fixed},
        lambda _: FunctionSampler(lambda number, _: chosen[number] if number < len(chosen) else None),
        training_command("policy", lambda assignment: words_of(assignment, options, fixed), 1000),
        places(arguments.workers),
    )
    run_study(confirming, resume=confirming.folder.exists())
    confirmed = [trial["values"]["held_out"]["mean"] for trial in summary_of(read_study(confirming.folder))["trials"]]
    regret: dict[str, list[list[float]]] = {name: [] for name in arguments.samplers}
    for (name, _), value in zip(done, confirmed, strict=True):
        regret[name].append([max(confirmed) - value])
    about = {
        "trials": arguments.trials,
        "steps": arguments.steps,
        "space": SPACE,
        "confirmed_with_seeds": arguments.confirm,
    }
    about["chosen"] = {
        f"{name}-{seed}": {"assignment": values, "confirmed": value, "measured": found["best"]["mean"]}
        for ((name, seed), found), values, value in zip(done.items(), chosen, confirmed, strict=True)
    }
    write(arguments.output, "quickstart", about, regret, "held-out accuracy lost by the choice")


def write(folder: Path, name: str, about: dict[str, Any], regret: dict[str, list[list[float]]], label: str) -> None:
    """JSON with the regret after the last trial, and against random search seed by seed; a figure."""
    last = {sampler: [curve[-1] for curve in curves] for sampler, curves in regret.items()}
    table = {s: {"regret": confidence_interval(v, [0.0] * len(v)), "seeds": v} for s, v in last.items()}
    for sampler, values in last.items():
        if sampler != "random" and "random" in last:
            table[sampler]["minus_random"] = confidence_interval(values, last["random"])
    libraries = ("optuna", "cmaes", "numpy")
    hardware = f"{platform.machine()}, {os.cpu_count()} cores"
    versions = {library: version(library) for library in libraries}
    result = {"about": about, "samplers": table, "curves": regret, "hardware": hardware, "versions": versions}
    write_json(folder / f"{name}.json", result)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    length = max(len(curve) for curves in regret.values() for curve in curves)
    if length > 1:
        for number, (sampler, curves) in enumerate(regret.items()):
            values = np.array(curves)
            axis.plot(np.arange(1, length + 1), values.mean(0), color=f"C{number}", label=sampler)
        axis.set(xlabel="trials", yscale="log")
        axis.legend(fontsize=7)
    else:
        for number, values in enumerate(last.values()):
            axis.plot([number] * len(values), values, "o", color=f"C{number}", alpha=0.5)
            axis.plot([number - 0.2, number + 0.2], [np.mean(values)] * 2, color=f"C{number}")
        axis.set_xticks(range(len(last)), list(last))
    axis.set(ylabel=label)
    axis.grid(alpha=0.3)
    with replacing(folder / f"{name}.png") as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    print(json.dumps({sampler: row["regret"] for sampler, row in table.items()}, indent=1))


PARTS = {"toy": toy, "quickstart": quickstart, "pruning": pruning}


def main() -> None:
    """Run a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--samplers", nargs="+", choices=list(SAMPLERS), help="all on the toy; random, tpe and gp else")
    parser.add_argument("--trials", type=int, help="of a study: 40 on the toy, 8 else")
    parser.add_argument("--seeds", type=int, help="studies of a sampler: 5; of a pruner: 2")
    parser.add_argument("--steps", type=int, help="of a quickstart's trial: 60; with pruners 24")
    parser.add_argument("--base", default="", help="more options of the quickstart's supervised model")
    parser.add_argument("--confirm", type=int, default=3, help="fresh seeds of a quickstart's choice")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fixed", default="", help="more options of the quickstart's trials")
    parser.add_argument("--runs", type=Path, default=Path("runs/tuning"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    on_toy, pruned = arguments.part == "toy", arguments.part == "pruning"
    arguments.samplers = arguments.samplers or (list(SAMPLERS) if on_toy else ["random", "tpe", "gp"])
    arguments.trials = arguments.trials or (40 if on_toy else 8)
    arguments.seeds = arguments.seeds or (2 if pruned else 5)
    arguments.steps = arguments.steps or (24 if pruned else 60)
    PARTS[arguments.part](arguments)


if __name__ == "__main__":
    main()
