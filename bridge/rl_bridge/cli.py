"""The command ``rl-fn``."""

import contextlib
import difflib
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_bridge.messages import is_expected, lines_of
from rl_bridge.terminal import say
from rl_bridge.tracking.scrubbing import environment_secrets, scrubbed_text
from rl_bridge.tracking.signals import Stopped

# A command's own modules are imported by the command alone: `rl-fn --help` needs none of torch, transformers and JAX.


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
        "rl_bridge.recipes:policy",
        "rl_bridge.pipelines.policy:run_policy",
        "post-training on groups of completions; without options: GRPO with DAPO's loss on two-digit arithmetic "
        "and a tiny model (the quickstart). objective:gspo takes GSPO with its own options.",
    ),
}
COMMANDS = {
    "train": "",
    "export": "rl_bridge.tracking.exporters.commands:run",
    "check": "rl_bridge.check.report:check",
    "quantize": "rl_bridge.quantize.commands:run",
    "tune": "rl_bridge.tuning.commands:run",
    "report": "rl_bridge.report.commands:run",
    "plan": "rl_bridge.memory.commands:run",
    "doctor": "rl_bridge.doctor:run",
}
"""Command → ``module:name`` of a function of the words behind it that returns the exit status."""
TRACEBACK = "--traceback"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the process's exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _print_anything()
    if words in (["--version"], ["-V"]):
        from importlib.metadata import version

        print(f"rl-fn {version('rl-fn')}")
        return 0
    if words in ([], ["--help"], ["-h"]):
        print(usage(), end="")
        return 0
    known = words[0] if words[0] in COMMANDS else None
    if known == "train" and len(words) > 1 and words[1] in TRAINERS:
        return _train(words[1], [word for word in words[2:] if word != TRACEBACK], traceback=TRACEBACK in words)
    if known == "train" and words[1:] in ([], ["--help"], ["-h"]):
        print(usage(), end="")
        return 0 if words[1:] else 2
    if known is not None and (run := COMMANDS[known]):
        rest = [word for word in words[1:] if word != TRACEBACK]
        # A study may ask a function of the user's what to try.
        helps = known != "tune" or not {"-h", "--help"}.isdisjoint(rest)
        return _guarded(lambda: load(run)(rest), traceback=TRACEBACK in words, helps=helps)
    say(_unknown(words), error=True)
    return 2


def _train(name: str, words: Sequence[str], *, traceback: bool) -> int:
    trainer, parsed = TRAINERS[name], []

    def parse_words() -> int:
        parsed.append(parse(load(trainer.default), words, prog=f"rl-fn train {name}"))
        return 0

    # An environment in which the libraries cannot be imported, such as JAX_PLATFORMS of no platform, is no traceback.
    status = _guarded(parse_words, traceback=traceback, helps=True)
    return report(load(trainer.run), parsed[0], traceback=traceback) if parsed else status


def _unknown(words: Sequence[str]) -> str:
    """What is said of a command that there is none of, with the names near it."""
    if words[0] == "train":
        near, names = difflib.get_close_matches(words[1], TRAINERS), TRAINERS
        what = f"train {words[1]!r}"
    else:
        near, names = difflib.get_close_matches(words[0], COMMANDS), COMMANDS
        what = f"{words[0]!r}"
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
    return f"rl-fn: error: unknown command {what}: {hint} (rl-fn --help)"


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
       rl-fn doctor [--output FOLDER]
       rl-fn --version

commands:
{trainers}  export               the record of a run for another program: what is new, and never twice
  check                rl_fn's dialects against an installed library's own functions: value and gradient
  quantize             rollouts in int8 or fp8: a checkpoint's profile, a file for FLASHRL_CONFIG, the error budget
  tune                 a study over a training command: a search space, seeds as repetitions, a journal
  report               one HTML file about runs: curves, completions with each token's numbers, warnings, options
  plan                 the memory of a run by phase and component before it starts, and what each option would save
  doctor               this machine: versions, devices, memory, disk, limits, kernels; each is ok or says what to do

{TRACEBACK} shows where an error of a run came from.
"""


def parse(default: Any, words: Sequence[str], *, prog: str) -> Any:
    """The config that a command line describes.

    ``default``: a config, a function of the words that returns one, or its class. The options of the pipeline may stand
    before and after the algorithm's sub-command. The process ends with status 2 for every option that cannot be.
    """
    import tyro

    from rl_bridge.tuning.options import options_of

    default = default(words) if callable(default) and not isinstance(default, type) else default
    settings: Any = {"args": list(words), "prog": prog, "config": (tyro.conf.CascadeSubcommandArgs,)}
    if not isinstance(default, type):
        settings["default"] = default
    kind = default if isinstance(default, type) else type(default)
    helps = not {"-h", "--help"}.isdisjoint(words)
    options = options_of(default)
    # Behind an option of several values the parser takes a misspelt recipe for one more value.
    if not any(map(options.no_recipe, words)):
        try:
            return tyro.cli(kind, console_outputs=helps, **settings)
        except SystemExit as left:
            if helps or left.code in (None, 0):
                raise
    try:
        if phrases := options.unknown(words):
            say(f"rl-fn: error: {'; '.join(phrases)}", error=True)
            raise SystemExit(2)
        return tyro.cli(kind, **settings)  # prints what is wrong with a value
    finally:
        say(f"all options: {prog} --help", error=True)


def report(run: Callable[[Any], dict[str, Any]], pipeline: Any, *, traceback: bool = False) -> int:
    """Run a pipeline and print its result on the last line. A user's mistake is one line, not a traceback.

    What nobody expected keeps its traceback; ``traceback`` shows every error's.
    """

    def to_its_end() -> int:
        summary = run(pipeline)
        say(f"{summary['result']} in {summary['seconds']:.0f} s")
        return 0

    return _guarded(to_its_end, traceback=traceback)


def _guarded(command: Callable[[], int], *, traceback: bool = False, helps: bool = False) -> int:
    """``helps``: the command runs no function of a user, and leaves with status 0 after ``--help`` alone."""
    try:
        return command()
    except Stopped as stop:
        say(f"{stop}; go on with the same command and --name {stop.name} --resume")
        return 128 + stop.number
    except KeyboardInterrupt as stop:
        say("; ".join(["stopped at once", *getattr(stop, "__notes__", [])]))
        return 128 + getattr(stop, "number", signal.SIGINT)
    except SystemExit as left:
        # The ranks of a torchrun job that only serve end here. Of a run it is a user's function that left.
        if left.code not in (None, 0) or os.environ.get("RANK", "0") != "0":
            raise
        if helps:
            return 0
        if traceback:
            _show_traceback(left)
        say("rl-fn: error: a function called sys.exit() in the middle of the run", error=True)
        return 1
    except Exception as error:
        message, hints = lines_of(error)
        # torchrun ends this process soon: what waits in a buffer would be lost.
        for hint in hints:
            say(hint, flush=True)
        if traceback or not is_expected(error):
            _show_traceback(error)
        say(f"rl-fn: error: {message}", error=True)
        return 1


def _show_traceback(error: BaseException) -> None:
    """As the interpreter shows it, without secrets and what does not print."""
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        sys.excepthook(type(error), error, error.__traceback__)
    say(scrubbed_text(shown.getvalue(), environment_secrets()).rstrip("\n"), error=True)


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
