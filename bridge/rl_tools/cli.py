"""The command ``rl-fn``."""

import contextlib
import difflib
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from rl_bridge.common.scrubbing import environment_secrets, scrubbed_text
from rl_bridge.common.terminal import Stopped, escaped, say
from rl_bridge.run.run_toml import dashed
from rl_tools.command_words import HELP, is_run_file
from rl_tools.trainer_options import TRAINERS, algorithms, load
from rl_tools.trainers import NoTrainer, config_of, expanded, observers_of

_ADVICE = {
    errno.ENOSPC: "free some space on the disk",
    errno.EDQUOT: "free some space within the quota",
    errno.EROFS: "give --output a folder that can be written to",
    errno.EACCES: "give --output a folder that can be written to",
    errno.EPERM: "give --output a folder that can be written to",
}
_PLAIN = (ValueError, FileNotFoundError, ModuleNotFoundError, NotImplementedError)
"""Their messages are written for the user and need no name of a class in front."""
_EXPECTED = (*_PLAIN, OSError, FloatingPointError, MemoryError, TypeError)
"""Errors that a user's input, files, functions or machine can bring about."""
_EXPECTED_ELSEWHERE = {
    "safetensors",
    "safetensors_rust",
    "jinja2",
    "huggingface_hub",
    "rl_bridge",
    "rl_train",
    "rl_tools",
    "torch",
}
"""Packages whose own classes of errors are about files, templates and machines too."""


def is_expected(error: BaseException) -> bool:
    """Whether one line says enough about an error."""
    cause = _cause(error)
    packages = {kind.__module__.split(".")[0] for kind in type(cause).__mro__}
    is_usual = isinstance(cause, _EXPECTED) or not packages.isdisjoint(_EXPECTED_ELSEWHERE)
    return is_usual or _is_jax_without_backend(cause)


def lines_of(error: BaseException) -> tuple[str, list[str]]:
    """(The error in one line, its notes for the user), without secrets and characters that do not print."""
    cause = _cause(error)
    text = str(cause).strip()
    if _is_jax_without_backend(cause):
        platforms = os.environ.get("JAX_PLATFORMS", "")
        # Its notes are about JAX's own frames.
        return _shown(f"JAX_PLATFORMS={platforms}: {text}; unset the variable, or set JAX_PLATFORMS=cpu"), []
    if isinstance(cause, ModuleNotFoundError) and cause.name in _packages_of_bridge():
        text = f"this command needs {cause.name}, which is not installed: pip install '.[bridge]'"
    elif not isinstance(cause, _PLAIN) or isinstance(cause, UnicodeError) or not text:
        name = next(kind.__name__ for kind in type(cause).__mro__ if not kind.__name__.startswith("_"))
        text = f"{name}: {text}" if text else name
    if isinstance(cause, OSError) and cause.errno in _ADVICE:
        unread = isinstance(cause.filename, str) and os.path.isfile(cause.filename)
        denied = cause.errno in (errno.EACCES, errno.EPERM) and unread and not os.access(cause.filename, os.R_OK)
        advice = "this user may not read the file" if denied else _ADVICE[cause.errno]
        text = f"{cause.strerror}{f': {cause.filename}' if cause.filename else ''}; {advice}"
    return _shown(" ".join(text.split())), [_shown(note) for note in _notes(error)]


def _packages_of_bridge() -> set[str]:
    """The names under which the packages of the extra ``bridge`` are imported; none where rl-fn is not installed."""
    try:
        lines = metadata.requires("rl-fn") or []
    except metadata.PackageNotFoundError:
        return set()
    names = (line for line in lines if re.search(r"""extra == ['"]bridge['"]""", line))
    return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in names}


def _is_jax_without_backend(error: BaseException) -> bool:
    """JAX's own error where the environment asks for a platform that it does not have here."""
    has_variable = bool(os.environ.get("JAX_PLATFORMS"))
    return has_variable and isinstance(error, RuntimeError) and str(error).startswith("Unable to initialize backend")


def _shown(text: str) -> str:
    return escaped(scrubbed_text(text, environment_secrets()))


def _notes(error: BaseException) -> list[str]:
    """Notes of the error, or of the one behind which it was raised: closing a dead worker fails once more."""
    behind: BaseException | None = error
    while behind is not None:
        if notes := getattr(behind, "__notes__", []):
            return list(notes)
        behind = behind.__cause__ or behind.__context__
    return []


def _cause(error: BaseException) -> BaseException:
    """The error that a worker raised, in place of the driver's account of it with the traceback."""
    # An import would fail where torch is not installed, and without the module there is no such error.
    executor = sys.modules.get("rl_bridge.executors.executor")
    is_account = executor is not None and isinstance(error, executor.WorkerError)
    return error.__cause__ if is_account and error.__cause__ is not None else error


# A command's own modules are imported by the command alone: `rl-fn --help` needs none of torch, transformers and JAX.
COMMANDS = {
    "train": "",
    "export": "rl_tools.export.command:run",
    "check": "rl_tools.check.check_command:check",
    "quantize": "rl_tools.quantize:run",
    "tune": "rl_tools.tune.tune_command:run",
    "report": "rl_tools.report.page:run",
    "plan": "rl_tools.plan.plan_command:run",
    "doctor": "rl_tools.doctor:run",
    "completion": "",
    "new": "rl_tools.new:run",
}
"""Command → ``module:name`` of a function of the words behind it that returns the exit status."""
TRACEBACK = "--traceback"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the process's exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _print_anything()
    if words in (["--version"], ["-V"]):
        say(f"rl-fn {metadata.version('rl-fn')}")
        return 0
    if words in ([], ["--help"], ["-h"]):
        print(usage(), end="")
        return 0
    command = words[0] if words[0] in COMMANDS else None
    if command == "train" and words[1:] in ([], ["--help"], ["-h"]):
        print(usage(), end="")
        return 0 if words[1:] else 2
    if command == "train":
        return _train([word for word in words[1:] if word != TRACEBACK], traceback=TRACEBACK in words)
    if command == "completion":
        from rl_tools.option_help import completion

        return _guarded(lambda: completion(words[1:], COMMANDS), helps=True)
    if command is not None and (run := COMMANDS[command]):
        rest = [word for word in words[1:] if word != TRACEBACK]
        # A study may call a function of the user's.
        helps = command != "tune" or not {"-h", "--help"}.isdisjoint(rest)
        return _guarded(lambda: load(run)(rest), traceback=TRACEBACK in words, helps=helps)
    say(f"rl-fn: error: unknown command {words[0]!r}: {_hint(words[0])} (rl-fn --help)", error=True)
    return 2


def _hint(word: str) -> str:
    """The command that a word may mean: one with a near name, or ``train`` with a trainer, a run file or a recipe."""
    commands = {name: name for name in COMMANDS} | {name: f"train {name}" for name in TRAINERS}
    if is_run_file(word):
        return f"did you mean rl-fn train {word}?"
    # The names of recipes stand in modules that take seconds to load.
    if near := difflib.get_close_matches(word.lower(), commands, cutoff=0.7):
        return f"did you mean {' or '.join(f'rl-fn {commands[name]}' for name in near)}?"
    with contextlib.suppress(ImportError):
        if (name := dashed(word).lower()) in algorithms():
            return f"did you mean rl-fn train {name}?"
    return f"there are {', '.join(COMMANDS)}"


def _train(words: Sequence[str], *, traceback: bool) -> int:
    """Run ``rl-fn train`` with the words behind it, which begin with a trainer or with run files, or with neither."""
    parsed: list[tuple[str, Any]] = []

    def parse_words() -> int:
        rest = [word for word in words if word not in HELP]
        if len(rest) < len(words) and not any(":" in word for word in rest):
            _print_short_help(rest)
        else:
            parsed.append(config_of(words, "train"))
        return 0

    # An environment in which the libraries cannot be imported, such as JAX_PLATFORMS of no platform, is no traceback.
    status = _guarded(parse_words, traceback=traceback, helps=True)
    if not parsed:
        return status
    name, options = parsed[0]
    run = load(TRAINERS[name].run)
    if options.dry_run:
        return _guarded(lambda: _dry_run(name, options, run), traceback=traceback)
    return report(lambda options: run(options, observers_of(options)), options, traceback=traceback)


def _print_short_help(words: Sequence[str]) -> None:
    """Print the page of the trainer that the words begin with, or that their run files name."""
    from rl_tools.option_help import short_help

    name, options = expanded(words)
    default = load(TRAINERS[name].default)
    say(short_help(name, default if isinstance(default, type) else default(options), options).rstrip("\n"))


def _dry_run(name: str, options: Any, run: Callable[..., Any]) -> int:
    """Print the options, do all of a run before its folder is made, read weights, and print the plan of its memory."""
    from rl_bridge.pipelines.dry_run import try_models
    from rl_bridge.run.run import DryRun
    from rl_bridge.run.run_toml import toml_of
    from rl_tools.plan.plan_command import counted, print_plan, read_lengths

    say(toml_of(options, name))
    try:
        run(options, observers_of(options))
    except DryRun:
        try_models(options)
        say("rows, model and reward are as the run needs them; its memory:")
    print_plan(counted(options), *read_lengths(options))
    return 0


def usage() -> str:
    """The text that ``rl-fn --help`` prints."""
    trainers = "".join(f"  train {name:<15}{trainer.about}\n" for name, trainer in TRAINERS.items())
    return f"""usage: rl-fn train {{{",".join(TRAINERS)}}} [--help] [--help-all] [{TRACEBACK}] [options]

       rl-fn train RUN.toml... [options]
       rl-fn train {{grpo,ppo,dpo,ALGORITHM}} [options] [options of the algorithm]
       rl-fn train policy [options] [objective:ALGORITHM] [options of the algorithm]
       rl-fn train {{reward-model,preference}} [options] [loss:LOSS] [options of the loss]
       rl-fn export RUN --to {{tensorboard,wandb,mlflow,trackio}} [--output FOLDER] [--project NAME] [--again]
       rl-fn check {{trl,verl,openrlhf,tunix,FILE.py:LOSS}}
       rl-fn quantize {{profile,setup,verify}} [--help] [options]
       rl-fn tune {{TRAINER,RUN.toml}} --space.OPTION DOMAIN [options]
       rl-fn report RUN... [--output FILE] [--watch [SECONDS]]
       rl-fn plan {{TRAINER,RUN.toml,FOLDER}} [--fits 24GiB] [--prompt-tokens N] [options]
       rl-fn doctor [--output FOLDER]
       rl-fn completion {{bash,zsh}}
       rl-fn new LOOP FILE.py
       rl-fn --version

commands:
{trainers}  export               the record of a run for another program: what is new, and never twice
  check                rl_fn's dialects against an installed library's own functions, or the laws of a loss of yours
  quantize             rollouts in int8 or fp8: a checkpoint's profile, a file for FLASHRL_CONFIG, the error budget
  tune                 a study over a training command: a search space, seeds as repetitions, a journal
  report               one HTML file about runs: curves, completions with each token's numbers, warnings, options
  plan                 the memory of a run by phase and component before it starts, and what each option would save
  doctor               this machine: versions, devices, memory, disk, limits, kernels; each is ok or says what to do
  new                  a whole loop as a file of your own: grpo, ppo, sft, preference, reward_model, conversations, …
  completion           a script with which a shell completes commands and options

{TRACEBACK} shows where an error of a run came from.
"""


def report(run: Callable[[Any], dict[str, Any]], pipeline: Any, *, traceback: bool = False) -> int:
    """Run a pipeline and print its result on the last line. A user's mistake is one line, not a traceback.

    An unexpected error keeps its traceback; ``traceback`` shows every error's.
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
        # The ranks of a torchrun job that only serve end here. In a run, a user's function has called sys.exit().
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
        # torchrun ends this process soon: text that waits in a buffer would be lost.
        for hint in hints:
            say(hint, flush=True)
        if traceback or not is_expected(error):
            _show_traceback(error)
        say(f"rl-fn: error: {message}", error=True)
        return 2 if isinstance(error, NoTrainer) else 1


def _show_traceback(error: BaseException) -> None:
    """Print the traceback as the interpreter does, without secrets and characters that do not print."""
    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        sys.excepthook(type(error), error, error.__traceback__)
    say(scrubbed_text(output.getvalue(), environment_secrets()).rstrip("\n"), error=True)


def _print_anything() -> None:
    """Let a terminal without UTF-8 show question marks for characters that it lacks, instead of ending a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
