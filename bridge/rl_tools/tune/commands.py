"""``rl-fn tune TRAINER …`` and ``rl-fn tune report STUDY``."""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_bridge.common.terminal import say
from rl_tools.trainers import TrainerOptions, options_of
from rl_tools.tune.goals import Goal, Pruning, parse_constraint, parse_goal
from rl_tools.tune.journal import Journal, library
from rl_tools.tune.samplers import SAMPLERS, FunctionSampler, OptunaSampler, Sampler, load_function
from rl_tools.tune.scheduler import Plan
from rl_tools.tune.space import Space, corners, read_space, words_of

SPACE = "--space"
DEFAULTS = {
    "policy": parse_goal("held_out", maximize=True),
    "sft": parse_goal("held_out_nll:best", maximize=False),
    "preference": parse_goal("held_out_accuracy:best", maximize=True),
    "reward-model": parse_goal("held_out_accuracy:best", maximize=True),
}
"""Trainer → what is looked for without a word."""


def run(words: Sequence[str]) -> int:
    """Run a command; returns the exit status."""
    words = list(words)
    if words[:1] == ["report"]:
        return _report(words[1:])
    from rl_tools import trainers

    made = parser()
    if words[:1] and words[0] in trainers.TRAINERS and not {"-h", "--help"} & set(words):
        return _tune(words[0], words[1:], made)
    if words and words[0] not in trainers.TRAINERS and not words[0].startswith("-"):
        made.error(f"unknown trainer {words[0]!r}; there is {', '.join(trainers.TRAINERS)}")
    made.print_help()
    return 0


def parser() -> argparse.ArgumentParser:
    """The study's own options. All other words are the trainer's."""
    made = argparse.ArgumentParser(
        prog="rl-fn tune",
        usage="rl-fn tune {sft,reward-model,preference,policy} --space.OPTION DOMAIN … [options] [options of the "
        "trainer]\n       rl-fn tune report STUDY",
        description="A study over a training command. A DOMAIN is log:1e-5..1e-3, int:1..8, 0.5..1 or a,b,c.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add(SPACE, metavar="MODULE:FUNCTION", help="a function that proposes, in place of --space.OPTION and --sampler")
    add(
        "--maximize", action="append", default=[], metavar="METRIC", help="a goal: held_out, held_out:best, reward:mean"
    )
    add("--minimize", action="append", default=[], metavar="METRIC", help="a goal: kl, tokens, seconds")
    add("--constraint", action="append", default=[], metavar="'kl<=0.1'", help="of the mean over seeds")
    add(
        "--sampler",
        metavar="{" + ",".join(SAMPLERS) + "}",
        default="random",
        help="what proposes, all of them Optuna's",
    )
    add("--sampler-seed", type=int, default=0, help="the same seed proposes the same again")
    add("--grid-points", type=int, default=3, help="values of each range, for the sampler grid")
    add("--startup-trials", type=int, help="random ones before a sampler learns (a quarter)")
    add("--trials", type=int, default=20, help="assignments that are tried")
    add("--seeds", type=int, default=1, help="repetitions of each, with --seed 0, 1, …")
    add("--confirm", type=int, default=0, metavar="N", help="at the end the best trial runs again with N fresh seeds")
    add("--first-seed", type=int, default=0, help="the first of them")
    add(
        "--pruner",
        choices=("none", "paired", "asha"),
        default="none",
        help="stops hopeless trials early; paired needs 3 seeds",
    )
    add(
        "--prune-after", type=int, default=1, metavar="STEPS", help="no trial is stopped before; the first rung of asha"
    )
    add("--prune-factor", type=int, default=3, help="asha: one of so many trials goes on")
    add("--prune-pairs", type=int, default=4, help="paired: evaluations in common of each seed, at least")
    add("--prune-margin", type=float, default=0.0, help="paired: a trial may be worse by so much")
    add("--parallel", type=int, default=1, help="processes at a time")
    add("--devices", default="", help="for CUDA_VISIBLE_DEVICES of the processes in turn: 0,1")
    add("--pin", action="store_true", help="bind each process to its share of the cores")
    add("--time-limit", type=float, help="seconds after which a process is ended and its trial has failed")
    add("--retries", type=int, default=2, help="how often a run goes on whose process something else killed")
    add("--grace", type=float, default=60.0, help="seconds from SIGTERM to SIGKILL")
    add("--name", default="tune", help="of the study's folder")
    add("--output", type=Path, default=Path("runs"), help="the folder of all studies and runs")
    add("--resume", action="store_true", help="go on with the study of this name")
    return made


def _tune(trainer: str, words: list[str], made: argparse.ArgumentParser) -> int:
    from rl_tools import trainers
    from rl_tools.tune.study import Study, places, run_study, training_command
    from rl_tools.tune.study_report import write_report

    domains, rest = _split(words)
    own, fixed = made.parse_known_args(rest)
    default = trainers.load(trainers.TRAINERS[trainer].default)
    default = default if isinstance(default, type) else default(fixed)
    options = options_of(default)
    for word in fixed:
        if word.startswith("--"):
            _require_fixed(word, options)
    prog = f"rl-fn tune {trainer}"
    if own.space is not None:
        if domains:
            raise ValueError(f"--space {own.space} proposes all options: leave --space.{next(iter(domains))} out")
        space, goals = None, _goals(own, trainer)
        trainers.parse(default, fixed, prog=prog)
    else:
        space, goals = read_space(domains, options, fixed), _goals(own, trainer)
        for corner in corners(space):
            trainers.parse(default, words_of(corner, options, fixed), prog=prog)

    def known(values: Mapping[str, Any]) -> None:
        for name in values:
            options.require(name)

    def sampler(journal: Journal | None) -> Sampler:
        if space is None:
            return FunctionSampler(load_function(own.space), [] if journal is None else journal.events, known)
        return OptunaSampler(
            own.sampler,
            space,
            own.sampler_seed,
            goals=len(goals),
            grid_points=own.grid_points,
            startup=own.startup_trials,
            trials=own.trials,
            storage=None if journal is None else journal.storage,
        )

    # What is missing shows before a folder is made.
    library("optuna")
    sampler(None)
    pruning = Pruning(own.pruner, own.prune_after, own.prune_pairs, own.prune_margin, own.prune_factor)
    plan = Plan(
        goals=goals,
        constraints=tuple(parse_constraint(text) for text in own.constraint),
        trials=own.trials,
        seeds=own.seeds,
        slots=own.parallel,
        time_limit=own.time_limit,
        retries=own.retries,
        pruning=pruning,
        confirm=own.confirm,
    )
    study = Study(
        own.output / own.name,
        plan,
        _about(own, trainer, fixed, space, plan),
        sampler,
        training_command(trainer, lambda assignment: words_of(assignment, options, fixed), own.first_seed),
        places(own.parallel, devices=own.devices.split(",") if own.devices else (), pin=own.pin),
        own.grace,
    )
    events = run_study(study, resume=own.resume)
    say("\n".join(write_report(study.folder)))
    return 0 if any(event["kind"] == "told" and event["status"] == "complete" for event in events) else 1


def _split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """(``--space.NAME DOMAIN`` by name, the other words)."""
    domains: dict[str, str] = {}
    rest: list[str] = []
    taken = iter(words)
    for word in taken:
        if not word.startswith(f"{SPACE}."):
            rest.append(word)
            continue
        name, equals, domain = word[len(SPACE) + 1 :].partition("=")
        name = name.replace("_", "-")
        if not equals:
            domain = next(taken, "")
        if not domain or domain.startswith("--"):
            raise ValueError(f"--space.{name} needs a domain: log:1e-5..1e-3, int:1..8, 0.5..1 or a,b,c")
        if name in domains:
            raise ValueError(f"--space.{name} is there twice")
        domains[name] = domain
    return domains, rest


def _require_fixed(word: str, options: TrainerOptions) -> None:
    name = word[2:].partition("=")[0].replace("_", "-")
    if name in ("seed", "resume-anyway"):
        raise ValueError(f"--{name} is the study's own: give --seeds and --first-seed, and --resume")
    # --no-packing is the other value of --packing.
    plain = ".".join([*name.split(".")[:-1], name.split(".")[-1].removeprefix("no-")])
    if plain not in options.kinds:
        options.require(name)


def _goals(own: argparse.Namespace, trainer: str) -> tuple[Goal, ...]:
    up = [parse_goal(text, maximize=True) for text in own.maximize]
    goals = (*up, *(parse_goal(text, maximize=False) for text in own.minimize))
    return goals or (DEFAULTS[trainer],)


def _about(
    own: argparse.Namespace, trainer: str, fixed: Sequence[str], space: Space | None, plan: Plan
) -> dict[str, Any]:
    """What a study that goes on has to have unchanged."""
    return {
        "trainer": trainer,
        "fixed": shlex.join(fixed),
        "space": own.space if space is None else space.described(),
        "goals": [{"name": goal.name, "maximize": goal.maximize} for goal in plan.goals],
        "constraints": [constraint.text for constraint in plan.constraints],
        "sampler": "function" if space is None else own.sampler,
        "sampler_seed": own.sampler_seed,
        "grid_points": own.grid_points,
        "startup_trials": own.startup_trials,
        "seeds": plan.seeds,
        "first_seed": own.first_seed,
        "pruning": vars(plan.pruning),
    }


def _report(words: list[str]) -> int:
    from rl_tools.tune.study_report import write_report

    made = argparse.ArgumentParser(prog="rl-fn tune report", description="Tables and figures of a study, once more.")
    made.add_argument("study", type=Path, help="the study's folder")
    made.add_argument("--json", action="store_true", help="print report.json")
    own = made.parse_args(words)
    lines = write_report(own.study)
    say(json.dumps(json.loads((own.study / "report.json").read_text()), indent=2) if own.json else "\n".join(lines))
    return 0
