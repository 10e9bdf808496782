"""The command ``rl-fn``."""

import dataclasses
import importlib
import io
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tyro

from rl_bridge.messages import is_expected, lines_of
from rl_bridge.tracking.run import Stopped


@dataclass(frozen=True)
class Trainer:
    """A line of ``rl-fn train``'s table. Nothing of a trainer is loaded before it is asked for."""

    default: str
    """``module:name`` of a function that returns the default config, or of the config's class."""
    run: str
    """``module:name`` of the function that runs a config to its end and returns the summary.

    ``summary["result"]`` is one sentence about it, and ``summary["seconds"]`` the time it took.
    """
    about: str


TRAINERS = {
    "sft": Trainer(
        "rl_bridge.pipelines.sft:SFTPipeline",
        "rl_bridge.pipelines.sft:run_sft",
        "supervised fine-tuning on conversations, or prompts with responses; the best model on held-out rows is "
        "exported.",
    ),
    "reward-model": Trainer(
        "rl_bridge.pipelines.reward_model:RewardModelPipeline",
        "rl_bridge.pipelines.reward_model:run_reward_model",
        "a model that scores completions, from pairs or ranked lists; loss:plackett-luce is for lists.",
    ),
    "preference": Trainer(
        "rl_bridge.pipelines.preference:PreferencePipeline",
        "rl_bridge.pipelines.preference:run_preference",
        "a policy from preferred and rejected completions: DPO. loss:simpo takes SimPO with its own options.",
    ),
    "policy": Trainer(
        "rl_bridge.recipes:quickstart",
        "rl_bridge.pipelines.policy:run_policy",
        "post-training on groups of completions; without options: GRPO with DAPO's loss on two-digit arithmetic "
        "and a tiny model (the quickstart). objective:gspo takes GSPO with its own options.",
    ),
}
TRACEBACK = "--traceback"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the process's exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _print_anything()
    if words[:1] == ["check"]:
        # Not loaded for a training run.
        from rl_bridge.check.report import check

        return check(words[1:])
    if words[:1] == ["quantize"]:
        from rl_bridge.quantize.commands import run

        return _guarded(lambda: run(words[1:]), helps=True)
    if words[:1] == ["tune"]:
        from rl_bridge.tuning.commands import run as tune

        return _guarded(lambda: tune([word for word in words[1:] if word != TRACEBACK]), traceback=TRACEBACK in words)
    if words[:1] == ["report"]:
        from rl_bridge.report.commands import run as report_on

        return _guarded(lambda: report_on(words[1:]), helps=True)
    if words[:1] == ["plan"]:
        from rl_bridge.memory.commands import run as plan

        return _guarded(lambda: plan(words[1:]), helps=True)
    if words == ["doctor"]:
        return print_diagnosis()
    if words[:1] == ["export"]:
        from rl_bridge.tracking.exporters.commands import run as export

        return _guarded(lambda: export(words[1:]), helps=True)
    if words[:1] == ["train"] and len(words) > 1 and words[1] in TRAINERS:
        trainer, rest = TRAINERS[words[1]], [word for word in words[2:] if word != TRACEBACK]
        pipeline = parse(load(trainer.default), rest, prog=f"rl-fn train {words[1]}")
        return report(load(trainer.run), pipeline, traceback=TRACEBACK in words)
    wanted = words in ([], ["--help"], ["-h"])
    print(usage() if wanted else f"rl-fn: unknown command {' '.join(words)!r}\n{usage()}", end="")
    return 0 if wanted else 2


def usage() -> str:
    """What ``rl-fn --help`` prints."""
    trainers = "".join(f"  train {name:<15}{trainer.about}\n" for name, trainer in TRAINERS.items())
    return f"""usage: rl-fn train {{{",".join(TRAINERS)}}} [--help] [{TRACEBACK}] [options]

       rl-fn train policy [options] [objective:ALGORITHM] [options of the algorithm]
       rl-fn train {{reward-model,preference}} [options] [loss:LOSS] [options of the loss]
       rl-fn export RUN --to {{tensorboard,wandb,mlflow,trackio}} [--output FOLDER] [--project NAME] [--again]
       rl-fn check {{trl,verl,openrlhf,tunix}}
       rl-fn quantize {{profile,setup,verify}} [--help] [options]
       rl-fn tune TRAINER --space.OPTION DOMAIN [options]
       rl-fn report RUN... [--output FILE] [--watch [SECONDS]]
       rl-fn plan {{TRAINER,FOLDER}} [--fits 24GiB] [--prompt-tokens N] [options]
       rl-fn doctor

commands:
{trainers}  export               the record of a run for another program: what is new, and never twice
  check                rl_fn's dialects against an installed library's own functions: value and gradient
  quantize             rollouts in int8 or fp8: a checkpoint's profile, a file for FLASHRL_CONFIG, the error budget
  tune                 a study over a training command: a search space, seeds as repetitions, a journal
  report               one HTML file about runs: curves, completions with each token's numbers, warnings, options
  plan                 the memory of a run by phase and component before it starts, and what each option would save
  doctor               this machine's device and versions, and which backend each kernel operation takes here

{TRACEBACK} shows where an error of a run came from.
"""


def parse(default: Any, words: Sequence[str], *, prog: str) -> Any:
    """The config that a command line describes. ``default``: a config, a function that returns one, or its class.

    The options of the pipeline may stand before and after the algorithm's sub-command. Not a number is no option's
    value: the process ends with status 2, as for every option that cannot be.
    """
    settings: Any = {"args": list(words), "prog": prog, "config": (tyro.conf.CascadeSubcommandArgs,)}
    if isinstance(default, type):
        config = tyro.cli(default, **settings)
    else:
        default = default() if callable(default) else default
        config = tyro.cli(type(default), default=default, **settings)
    for name in not_numbers(config):
        print(f"{prog}: error: --{name} is not a number", file=sys.stderr)
        raise SystemExit(2)
    return config


def not_numbers(config: Any, prefix: str = "") -> Iterator[str]:
    """Names of the options that are NaN, as the command line has them."""
    for option in dataclasses.fields(config):
        name, value = f"{prefix}{option.name.replace('_', '-')}", getattr(config, option.name)
        if dataclasses.is_dataclass(value):
            yield from not_numbers(value, f"{name}.")
        elif isinstance(value, float) and math.isnan(value):
            yield name


def print_diagnosis() -> int:
    """The doctor's findings as a table."""
    from rich.console import Console
    from rich.table import Table

    from rl_kernels.doctor import doctor

    found = doctor()
    table = Table("operation", "backend", "others", title=f"{found.device}: {found.name}")
    for finding in found.findings:
        table.add_row(finding.operation, finding.backend, "; ".join(f"{n}: {why}" for n, why in finding.others.items()))
    console = Console()
    console.print(", ".join(f"{name} {number}" for name, number in found.versions.items()))
    console.print(table)
    return 0


def report(run: Callable[[Any], dict[str, Any]], pipeline: Any, *, traceback: bool = False) -> int:
    """Run a pipeline and print its result on the last line. A user's mistake is one line, not a traceback.

    What nobody expected keeps its traceback; ``traceback`` shows every error's.
    """

    def to_its_end() -> int:
        summary = run(pipeline)
        print(f"{summary['result']} in {summary['seconds']:.0f} s")
        return 0

    return _guarded(to_its_end, traceback=traceback)


def _guarded(command: Callable[[], int], *, traceback: bool = False, helps: bool = False) -> int:
    """``helps``: the command runs no function of a user, and leaves with status 0 after ``--help`` alone."""
    try:
        return command()
    except Stopped as stop:
        print(f"{stop}; go on with the same command and --name {stop.name} --resume")
        return 128 + stop.number
    except KeyboardInterrupt as stop:
        print("; ".join(["stopped at once", *getattr(stop, "__notes__", [])]))
        return 130
    except SystemExit as left:
        # The ranks of a torchrun job that only serve end here. Of a run it is a user's function that left.
        if left.code not in (None, 0) or os.environ.get("RANK", "0") != "0":
            raise
        if helps:
            return 0
        if traceback:
            sys.excepthook(type(left), left, left.__traceback__)
        print("rl-fn: error: a function called sys.exit() in the middle of the run", file=sys.stderr)
        return 1
    except Exception as error:
        message, hints = lines_of(error)
        # torchrun ends this process soon: what waits in a buffer would be lost.
        print("\n".join(hints), end="\n" if hints else "", flush=True)
        if traceback or not is_expected(error):
            sys.excepthook(type(error), error, error.__traceback__)
        print(f"rl-fn: error: {message}", file=sys.stderr)
        return 1


def load(place: str) -> Any:
    """What ``module:name`` names."""
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def _print_anything() -> None:
    """A terminal without UTF-8 shows a question mark for what it lacks, instead of ending a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
