"""``rl-fn tune TRAINER …`` and ``rl-fn tune report STUDY``."""

import argparse
import difflib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from rl_bridge.common.terminal import remark, say
from rl_bridge.run.options import in_vain, require_name, require_output
from rl_bridge.run.run_toml import dashed
from rl_tools.command_words import HELP_ALL
from rl_tools.number_options import SEEDS, Parser, number, whole
from rl_tools.trainer_options import TrainerOptions, options_of
from rl_tools.tune.contents import contents, differences_of
from rl_tools.tune.goals import Goal, Pruning, parse_constraint, parse_goal
from rl_tools.tune.journal import Event, Journal, library
from rl_tools.tune.samplers import SAMPLERS, STARTUP, FunctionSampler, OptunaSampler, Propose, Sampler, load_function
from rl_tools.tune.scheduler import Plan
from rl_tools.tune.space import JOINT, Assignment, Space, corners, plain, read_space, words_of

SPACE = "--space"
ELSEWHERE = {
    **dict.fromkeys(("n-trials", "num-trials", "max-trials", "num-samples", "count"), "trials"),
    **dict.fromkeys(("n-jobs", "max-concurrent-trials", "max-concurrent", "num-workers"), "parallel"),
    **dict.fromkeys(("direction", "directions", "metric", "mode", "objective-metric", "goal"), "maximize"),
    **dict.fromkeys(("search-alg", "algorithm", "method"), "sampler"),
    **dict.fromkeys(("timeout", "time-budget-s", "max-time"), "time-limit"),
    **dict.fromkeys(("n-startup-trials", "random-trials"), "startup-trials"),
    **dict.fromkeys(("study-name", "experiment-name"), "name"),
    **dict.fromkeys(("storage", "storage-path", "local-dir"), "output"),
    **{"scheduler": "pruner", "search-space": "space", "load-if-exists": "resume", "max-failures": "retries"},
}
"""Names of options in other programs that tune → their names here."""
TRIALS = 20
"""Trials of a study that says no number, but for a grid."""
DEFAULTS = {
    "policy": parse_goal("held_out", maximize=True),
    "sft": parse_goal("held_out_nll:best", maximize=False),
    "preference": parse_goal("held_out_loss:best", maximize=False),
    "reward-model": parse_goal("held_out_loss:best", maximize=False),
}
"""Trainer → the goal of a study that names none: of the model that the run's folder ``model`` has."""
OF_ANY_LOSS = parse_goal("held_out_accuracy:best", maximize=True)
"""The goal where trials have losses of unlike scale, so that their values cannot be compared."""


def run(words: Sequence[str]) -> int:
    """Run a command; returns the exit status."""
    words = list(words)
    if words[:1] == ["report"]:
        return _report(words[1:])
    from rl_tools import trainer_options, trainers

    command_line = parser()
    if not {"-h", "--help", HELP_ALL}.isdisjoint(words):
        command_line.print_help()
        trainer = words[0] if words[0] in trainer_options.TRAINERS else "TRAINER"
        say(f"\nall options of the trainer: rl-fn train {trainer} {HELP_ALL}")
        return 0
    trainer, rest = trainers.expanded(words, without={*trainer_options.OWN, *_searched(words)})
    return _tune(trainer, rest, command_line)


def parser() -> argparse.ArgumentParser:
    """The study's own options. All other words are the trainer's."""
    command_line = Parser(
        prog="rl-fn tune",
        usage="rl-fn tune {sft,reward-model,preference,policy,RUN.toml} --space.OPTION DOMAIN … [options] "
        "[options of the trainer]\n       rl-fn tune report STUDY",
        description="A study over a training command. A DOMAIN is log:1e-5..1e-3, int:1..8, 0.5..1 or a,b,c.",
        allow_abbrev=False,
    )
    add = command_line.add_argument
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
        help="the sampler that proposes the trials, one of Optuna's",
    )
    add("--sampler-seed", type=whole(0, SEEDS), default=0, help="the same seed proposes the same again")
    add("--grid-points", type=whole(1), default=3, help="values of each range, for the sampler grid")
    add("--startup-trials", type=whole(1), help="random ones before a sampler learns (a quarter)")
    add("--trials", type=whole(1), help=f"assignments that are tried ({TRIALS}; with --sampler grid all combinations)")
    add("--seeds", type=whole(1), default=1, help="repetitions of each, with --seed 0, 1, …")
    add(
        "--confirm",
        type=whole(0),
        default=0,
        metavar="N",
        help="at the end the best trial runs again with N fresh seeds",
    )
    add("--first-seed", type=whole(0, SEEDS), default=0, help="--seed of the first repetition")
    add(
        "--pruner",
        choices=("none", "paired", "asha"),
        default="none",
        help="stops hopeless trials early; paired needs 3 seeds",
    )
    add(
        "--prune-after",
        type=whole(1),
        default=1,
        metavar="STEPS",
        help="no trial is stopped before this step; the first rung of asha",
    )
    add("--prune-factor", type=whole(2), default=3, help="asha: one of so many trials goes on")
    add("--prune-pairs", type=whole(2), default=4, help="paired: evaluations in common of each seed, at least")
    add("--prune-margin", type=number(least=0), default=0.0, help="paired: a trial may be worse by so much")
    add("--parallel", type=whole(1), default=1, help="processes at a time")
    add("--devices", default="", help="for CUDA_VISIBLE_DEVICES of the processes in turn: 0,1")
    add("--pin", action="store_true", help="bind each process to its share of the cores")
    add("--time-limit", type=number(), help="seconds after which a process is ended and its trial has failed")
    add("--retries", type=whole(0), default=2, help="how often a run goes on whose process something else killed")
    add("--grace", type=number(least=0), default=60.0, help="seconds from SIGTERM to SIGKILL")
    add("--name", default="tune", help="name of the study's folder")
    add("--output", type=Path, default=Path("runs"), help="the folder of all studies and runs")
    add("--resume", action="store_true", help="go on with the study of this name")
    return command_line


def _tune(trainer: str, words: list[str], command_line: argparse.ArgumentParser) -> int:
    from rl_tools import trainer_options, trainers
    from rl_tools.tune.study import Study, places, run_study, training_command
    from rl_tools.tune.study_report import write_report

    domains, rest = _split(words)
    arguments, fixed = command_line.parse_known_args(rest)
    default = trainer_options.load(trainer_options.TRAINERS[trainer].default)
    default = default if isinstance(default, type) else default(fixed)
    options = options_of(default)
    for word in fixed:
        if word.startswith("--"):
            _require_fixed(word, options, command_line)
    prog = f"rl-fn tune {trainer}"
    require_name(arguments.name, arguments.output)
    require_output(arguments.output, writable=True)
    _require_used(arguments, command_line)
    goals, space, example = _goals(arguments, trainer, domains), None, fixed
    if arguments.space is not None:
        if domains:
            raise ValueError(f"--space {arguments.space} proposes all options: leave --space.{next(iter(domains))} out")
        parsed = [trainers.parse(default, fixed, prog=prog)]
    else:
        space, parsed = read_space(domains, options, fixed), []
        for corner in corners(space):
            example = words_of(corner, options, fixed)
            parsed.append(_parse_corner(corner, example, default, prog))
    _remark_on_vain(parsed, default() if isinstance(default, type) else default)

    def require_known(values: Mapping[str, Any]) -> None:
        for name in values:
            options.require(name)

    propose = None if space is not None else _proposing(arguments, require_known)

    def sampler(journal: Journal | None) -> Sampler:
        if space is None:
            events = [] if journal is None else journal.events
            return FunctionSampler(cast(Propose, propose), events, require_known, f"{SPACE} {arguments.space}")
        return OptunaSampler(
            arguments.sampler,
            space,
            arguments.sampler_seed,
            goals=len(goals),
            grid_points=arguments.grid_points,
            startup=arguments.startup_trials,
            trials=TRIALS if arguments.trials is None else arguments.trials,
            storage=None if journal is None else journal.storage,
        )

    # A missing library or function shows before a folder is made.
    library("optuna")
    arguments.trials = _trials(arguments, sampler(None))
    for seed in _ends_of_seeds(arguments):
        trainers.parse(default, [*example, "--seed", str(seed)], prog=prog)
    plan = _plan(arguments, goals)
    reads = partial(contents, fixed, [*domains.values(), arguments.space or ""], parsed)
    before = reads()
    study = Study(
        arguments.output / arguments.name,
        plan,
        _about(arguments, trainer, fixed, space, plan) | before,
        sampler,
        training_command(trainer, lambda assignment: words_of(assignment, options, fixed), arguments.first_seed),
        places(
            arguments.parallel, devices=arguments.devices.split(",") if arguments.devices else (), pin=arguments.pin
        ),
        arguments.grace,
    )
    events = run_study(study, resume=arguments.resume)
    say("\n".join(write_report(study.folder)))
    for difference in differences_of(before, reads):
        say(difference)
    return 0 if _succeeded(events, arguments.confirm) else 1


def _parse_corner(corner: Assignment, words: Sequence[str], default: Any, prog: str) -> Any:
    """The config of a trial that has ends of the domains; where it is refused, these are named."""
    from rl_tools import trainers

    try:
        return trainers.parse(default, words, prog=prog)
    except SystemExit:
        values = ", ".join(f"{SPACE}.{name}: {value}" for name, value in corner.items())
        say(f"so a trial with these ends of the domains cannot be: {values}", error=True)
        raise


def _proposing(arguments: argparse.Namespace, check: Callable[[Mapping[str, Any]], None]) -> Propose:
    """The user's function. A new study's first proposal is made here: mistakes show before a folder is made.

    The proposal is taken over, as the function may have a state of its own.
    """
    propose = load_function(arguments.space)
    if arguments.resume:
        return propose
    first = FunctionSampler(propose, (), check, f"{SPACE} {arguments.space}").first()
    return partial(_first_or_next, first, propose)


def _first_or_next(first: Any, propose: Propose, number: int, earlier: list[dict[str, Any]]) -> Any:
    """A function that proposes, whose first proposal is there already."""
    return first if number == 0 else propose(number, earlier)


def _trials(arguments: argparse.Namespace, sampler: Sampler) -> int:
    """How many assignments are tried: as many as the user says, all of a grid, else ``TRIALS``."""
    combinations = sampler.combinations if isinstance(sampler, OptunaSampler) else None
    if arguments.trials is None:
        return TRIALS if combinations is None else combinations
    if combinations is not None and arguments.trials < combinations:
        remark(f"{arguments.trials} of {combinations} combinations of the grid are tried, drawn at random (--trials)")
    return arguments.trials


def _plan(arguments: argparse.Namespace, goals: tuple[Goal, ...]) -> Plan:
    pruning = Pruning(
        arguments.pruner, arguments.prune_after, arguments.prune_pairs, arguments.prune_margin, arguments.prune_factor
    )
    return Plan(
        goals=goals,
        constraints=tuple(parse_constraint(text) for text in arguments.constraint),
        trials=arguments.trials,
        seeds=arguments.seeds,
        slots=arguments.parallel,
        time_limit=arguments.time_limit,
        retries=arguments.retries,
        pruning=pruning,
        confirm=arguments.confirm,
    )


def _succeeded(events: Sequence[Event], confirm: int) -> bool:
    """Whether a trial can be chosen and, where the best one ran with fresh seeds, one of these runs came to its end."""
    from rl_tools.tune.study_report import summary_of

    best = summary_of(events)["best"]
    if best is None:
        if confirm:
            say(f"--confirm {confirm} ran nothing: there is no best trial")
        return False
    return "confirmed" in best or "unconfirmed" not in best


def _ends_of_seeds(arguments: argparse.Namespace) -> tuple[int, int]:
    """The first and the last seed of a study: what the trainer does not take of these, each run would refuse."""
    return arguments.first_seed, arguments.first_seed + max(0, arguments.seeds + arguments.confirm - 1)


def _require_used(arguments: argparse.Namespace, command_line: argparse.ArgumentParser) -> None:
    """Refuse the study's own options that nothing would read.

    Raises:
        ValueError: the message has the option, its value, and the option in whose way it stands.
    """
    sampler = ("sampler", "sampler_seed", "grid_points", "startup_trials")
    if arguments.space is not None:
        unread, beside = sampler, f"with --space {arguments.space}, which proposes all trials"
        _require_defaults(arguments, command_line, unread, beside)
    unread = [] if arguments.sampler == "grid" else ["grid_points"]
    unread += [] if arguments.sampler in STARTUP else ["startup_trials"]
    _require_defaults(arguments, command_line, unread, f"with --sampler {arguments.sampler}")
    read = {
        "none": (),
        "paired": ("prune_after", "prune_pairs", "prune_margin"),
        "asha": ("prune_after", "prune_factor"),
    }
    pruner = ("prune_after", "prune_factor", "prune_pairs", "prune_margin")
    unread = [name for name in pruner if name not in read[arguments.pruner]]
    _require_defaults(arguments, command_line, unread, f"with --pruner {arguments.pruner}")


def _require_defaults(
    arguments: argparse.Namespace, command_line: argparse.ArgumentParser, unread: Sequence[str], beside: str
) -> None:
    for name in unread:
        value = getattr(arguments, name)
        if value != command_line.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} {value} has no effect {beside}")


def _searched(words: Sequence[str]) -> set[str]:
    """Options that the space proposes values of: those of a run file give way."""
    names = [word[len(SPACE) + 1 :].partition("=")[0] for word in words if word.startswith(f"{SPACE}.")]
    parts = [part for name in names for part in plain(dashed(name))[0].split(JOINT)]
    return {*parts, *(f"{part}.name" for part in parts)}


def _split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """(``--space.NAME DOMAIN`` by name, the other words)."""
    domains: dict[str, str] = {}
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if not word.startswith(f"{SPACE}."):
            rest.append(word)
            continue
        name, equals, domain = word[len(SPACE) + 1 :].partition("=")
        name = name.replace("_", "-")
        if not equals:
            domain = next(remaining, "")
        if not domain or domain.startswith("--"):
            raise ValueError(f"--space.{name} needs a domain: log:1e-5..1e-3, int:1..8, 0.5..1 or a,b,c")
        if name in domains:
            raise ValueError(f"--space.{name} is there twice")
        domains[name] = domain
    return domains, rest


def _require_fixed(word: str, options: TrainerOptions, command_line: argparse.ArgumentParser) -> None:
    name = word[2:].partition("=")[0].replace("_", "-")
    if name == "dry-run":
        raise ValueError("--dry-run is of one run: rl-fn train has it")
    if name in ("seed", "resume-anyway"):
        raise ValueError(f"--{name} is the study's own: give --seeds and --first-seed, and --resume")
    # --no-packing is the other value of --packing.
    switch = ".".join([*name.split(".")[:-1], name.split(".")[-1].removeprefix("no-")])
    if switch in options.kinds:
        return
    try:
        options.require(name)
    except ValueError:
        own = [option for action in command_line._actions for option in action.option_strings]
        near = (
            [f"--{ELSEWHERE[name]}"] if name in ELSEWHERE else difflib.get_close_matches(f"--{name}", own, cutoff=0.75)
        )
        if not near:
            raise
        raise ValueError(
            f"neither rl-fn tune nor the trainer has --{name}; did you mean {' or '.join(near)}? (rl-fn tune --help)"
        ) from None


def _goals(arguments: argparse.Namespace, trainer: str, searched: Mapping[str, str]) -> tuple[Goal, ...]:
    """The goals that the command names, else the trainer's own, which is printed. ``searched``: option → domain."""
    up = [parse_goal(text, maximize=True) for text in arguments.maximize]
    goals = (*up, *(parse_goal(text, maximize=False) for text in arguments.minimize))
    if goals:
        return goals
    goal, reason = DEFAULTS[trainer], ""
    parts = [part for name in searched for part in plain(dashed(name))[0].split(JOINT)]
    by_loss = goal.metric == DEFAULTS["preference"].metric
    if by_loss and (arguments.space is not None or any(part.split(".")[0] == "loss" for part in parts)):
        reason = (
            f": values of unlike losses cannot be compared. A run's exported model is still that of its best "
            f"{goal.metric}"
        )
        goal = OF_ANY_LOSS
    say(f"the goal is to {'maximize' if goal.maximize else 'minimize'} {goal.name}{reason}")
    return (goal,)


def _about(
    arguments: argparse.Namespace, trainer: str, fixed: Sequence[str], space: Space | None, plan: Plan
) -> dict[str, Any]:
    """The settings that a study must have unchanged when it goes on."""
    return {
        "trainer": trainer,
        "fixed": shlex.join(fixed),
        "space": arguments.space if space is None else space.described(),
        "goals": [{"name": goal.name, "maximize": goal.maximize} for goal in plan.goals],
        "constraints": [constraint.text for constraint in plan.constraints],
        "sampler": "function" if space is None else arguments.sampler,
        "sampler_seed": arguments.sampler_seed,
        "grid_points": arguments.grid_points,
        "startup_trials": arguments.startup_trials,
        "seeds": plan.seeds,
        "first_seed": arguments.first_seed,
        "pruning": vars(plan.pruning),
    }


def _remark_on_vain(parsed: Sequence[Any], begun: Any) -> None:
    """Say which options no trial reads, of the configs ``parsed`` at the corners of the space."""
    for message in sorted(set.intersection(*(set(in_vain(config, begun)) for config in parsed))):
        remark(message)


def _report(words: list[str]) -> int:
    from rl_tools.tune.study_report import write_report

    command_line = argparse.ArgumentParser(
        prog="rl-fn tune report", description="Tables and figures of a study, once more."
    )
    command_line.add_argument("study", type=Path, help="the study's folder")
    command_line.add_argument("--json", action="store_true", help="print report.json")
    arguments = command_line.parse_args(words)
    lines = write_report(arguments.study)
    say(
        json.dumps(json.loads((arguments.study / "report.json").read_text()), indent=2)
        if arguments.json
        else "\n".join(lines)
    )
    return 0
