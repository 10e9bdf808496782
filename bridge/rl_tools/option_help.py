"""``rl-fn train TRAINER --help``: the options that most runs need, by their use; and words for a shell to complete."""

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import textwrap
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise, takewhile
from typing import Any

from rl_bridge.common.terminal import say
from rl_bridge.run.options import shown
from rl_bridge.run.run_toml import dashed
from rl_tools.new import loops
from rl_tools.trainer_options import TRAINERS, TrainerOptions, choices_of, load, options_of
from rl_tools.trainers import expanded

MOST = 40
"""Options on the short page."""
WIDTH = 100

USES = {
    "model and data": ("model", "data", "eval-data", "held-out", "apply-chat-template", "max-length"),
    "rewards": ("reward", "environment", "max-turns"),
    "steps": (
        *("steps", "epochs", "rows-per-step", "evaluate-every"),
        *("policy.steps", "policy.prompts-per-step", "policy.sampling.n"),
        *("policy.updates-per-step", "policy.evaluate-every", "sft.steps", "sft.rows-per-step"),
    ),
    "completions": ("policy.sampling.max-new-tokens", "policy.sampling.temperature", "rollout.backend"),
    "objective": ("objective", "loss", "kl-control.kind"),
    "optimiser": ("optimizer.learning-rate", "optimizer.warmup", "optimizer.decay", "lora.rank", "freeze"),
    "memory and speed": ("micro-batch-tokens", "packing", "dtype", "activations", "offload"),
    "processes": ("executor", "mesh.shard", "mesh.tensor", "asynchronous.max-staleness"),
    "the run": ("name", "output", "resume", "checkpoint-every", "seed", "trackers", "dry-run"),
}
"""Use → options. Those that a trainer does not have are not on its page."""


def short_help(trainer: str, config: Any, words: Sequence[str] = ()) -> str:
    """The page of ``--help``: at most ``MOST`` options, each with its default and a sentence.

    ``config``: the trainer's default config, or its class. ``words``: of the command, which may name a recipe.
    """
    options, texts = options_of(config), _texts(config)
    lines = [
        f"usage: rl-fn train {trainer} [RUN.toml...] [options]",
        "",
        *textwrap.wrap(TRAINERS[trainer].about, WIDTH),
    ]
    count = 0
    for use, names in USES.items():
        here = [name for name in names if name in options.kinds or name in options.recipes]
        count += len(here)
        if here:
            lines += ["", f"{use}:"]
        for name in here:
            lines += _option(name, options, texts, config)
    every = len(options.kinds) + len(options.of_recipes) + len(options.recipes)
    lines += ["", f"{count} of {every} options; all of them: rl-fn train {trainer} --help-all"]
    for holder in options.recipes:
        example = next((recipe for recipe in options.recipes[holder] if f"{holder}:{recipe}" in words), None)
        example = next(iter(options.recipes[holder])) if example is None else example
        lines.append(f"options of one {holder}: rl-fn train {trainer} {holder}:{example} --help")
    lines.append("The same names are keys of a run file: docs/training.md, A run is a file.")
    return "\n".join(lines) + "\n"


def _option(name: str, options: TrainerOptions, texts: dict[str, str], config: Any) -> list[str]:
    """The lines of one option: name, values and default, and under them the first sentence of its text."""
    if name in options.recipes:
        head = f"  {name}:NAME ({options.defaults[name]})"
        body = f"One of {', '.join(sorted(options.recipes[name]))}."
    else:
        head = " ".join(filter(None, [f"  --{name}", choices_of(options.kinds[name]), _default(name, config)]))
        body = texts[name].replace("``", "").partition(". ")[0].rstrip(".") + "."
    return [head, *textwrap.wrap(body, WIDTH, initial_indent="      ", subsequent_indent="      ")]


def _default(name: str, config: Any) -> str:
    """The default of an option in brackets; nothing where it has none."""
    value: Any = config
    for part in name.split("."):
        value = _field(value, part.replace("-", "_"))
    if value is None or value == () or value is dataclasses.MISSING:
        return ""
    return f"({('off', 'on')[value] if isinstance(value, bool) else shown(value)})"


def _field(holder: Any, name: str) -> Any:
    """The value of a field of a config, or its default in a class of configs."""
    if not isinstance(holder, type):
        return getattr(holder, name)
    option = next(option for option in dataclasses.fields(holder) if option.name == name)
    return option.default if option.default_factory is dataclasses.MISSING else option.default_factory()


def _texts(config: Any, prefix: str = "") -> dict[str, str]:
    """Option → the text under it in the source of its class."""
    kind = config if isinstance(config, type) else type(config)
    hints = typing.get_type_hints(kind)
    texts = {f"{prefix}{dashed(name)}": text for name, text in _texts_of(kind).items()}
    for option in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hint := hints[option.name]) and isinstance(hint, type):
            texts |= _texts(hint, f"{prefix}{dashed(option.name)}.")
    return texts


@cache
def _texts_of(kind: type) -> dict[str, str]:
    """Name → the text under the name, of a class and those that it inherits from."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base) or base.__module__ == "types":
            continue
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError):  # a class that was made by a function
            continue
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for statement, text in pairwise(statements):
            match statement, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    texts[name] = " ".join(words.split())
    return texts


# A shell's completion.

SHELLS = ("bash", "zsh")
OF_TRAINERS = ("train", "plan", "tune")
"""Commands that take the options of a trainer."""


def completion(words: list[str], commands: Mapping[str, str]) -> int:
    """``rl-fn completion bash`` prints the script that a shell reads; ``rl-fn completion -- WORDS`` prints the words
    that may come next."""
    if words[:1] == ["--"]:
        say("\n".join(next_words(words[1:], commands)))
        return 0
    if words not in ([shell] for shell in SHELLS):
        raise ValueError(f'give a shell, one of {", ".join(SHELLS)}: eval "$(rl-fn completion bash)"')
    start = "autoload -U +X bashcompinit && bashcompinit\n" if words == ["zsh"] else ""
    say(
        start + "_rl_fn() {\n"
        "  local words=(\"${COMP_WORDS[@]:1:COMP_CWORD}\") IFS=$'\\n'\n"
        '  local next="$(rl-fn completion -- "${words[@]}" 2>/dev/null)"\n'
        '  COMPREPLY=($(compgen -W "$next" -- "${COMP_WORDS[COMP_CWORD]}"))\n'
        "}\n"
        # A colon would end a word, and objective:gspo is one.
        "COMP_WORDBREAKS=${COMP_WORDBREAKS//:}\n"
        "complete -o default -F _rl_fn rl-fn"
    )
    return 0


def next_words(words: list[str], commands: Mapping[str, str]) -> list[str]:
    """Words that may stand in the place of the last one of ``words``, which may be a part of a word.

    None are the names of files, which a shell completes where there is nothing else. ``commands``: command → function.
    """
    # A shell takes `--dtype=float32` for three words.
    before, last = [word for word in words[:-1] if word != "="], (words or [""])[-1].removeprefix("=")
    candidates = _behind(before[0], before[1:], commands) if before else [*commands, "--help", "--version"]
    return sorted({word for word in candidates if word.startswith(last)})


def _behind(command: str, words: Sequence[str], commands: Mapping[str, str]) -> list[str]:
    """Words that may follow the ``words`` behind a command: values of the option that they end with, or options."""
    if command == "completion" or command not in commands:
        return list(SHELLS) if command == "completion" and not words else []
    page = _page(commands[command])
    firsts = _first_words(command, page)
    if not words:
        return [*firsts, *_options_of(page), "--help"]
    if command == "quantize" and words[0] in firsts:
        page = _page(commands[command], words[0])
    takes: dict[str, list[str] | None] = dict(_options_of(page))
    options = TrainerOptions()
    if command in OF_TRAINERS and (trainer := _trainer(words)) is not None:
        default = load(TRAINERS[trainer].default)
        options = options_of(default if isinstance(default, type) else default(()))
    kinds = options.kinds | options.of_recipes
    takes |= {f"--{name}": None if kind is bool else _values(kind) for name, kind in kinds.items()}
    if command == "tune":
        takes |= {f"--space.{name}": [] for name in (*kinds, *options.recipes)}
    if (values := takes.get(words[-1])) is not None:
        return values
    recipes = [f"{holder}:{name}" for holder, names in options.recipes.items() for name in names]
    return [*takes, *recipes, "--help", *(["--help-all"] if options.kinds else [])]


def _trainer(words: Sequence[str]) -> str | None:
    """The trainer that words begin with, or that their run files name; None where neither does."""
    try:
        return expanded(list(takewhile(lambda word: not word.startswith("-"), words)))[0]
    except ValueError:
        return None


def _values(kind: Any) -> list[str]:
    """The values of an option that has a few; a switch takes none, unless it may be None as well.

    >>> _values(bool | None), _values(bool)
    (['True', 'False'], [])
    """
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return [str(value) for value in parts]
    return [value for part in parts for value in (["True", "False"] if part is bool else _values(part))]


@cache
def _page(function: str, *words: str) -> str:
    """The page that a command prints for ``--help``; of ``train``, whose options are its trainer's, none."""
    page = io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
        if function:
            load(function)([*words, "--help"])
    return page.getvalue()


def _options_of(page: str) -> dict[str, list[str] | None]:
    """Option of a page → its values, as far as the page lists these; None for a switch."""
    takes: dict[str, list[str] | None] = {}
    for option, listed in re.findall(r"(?<![\w.-])(--[a-z][a-z-]*)(?![\w.-])(?: \[?(\{[^}]*\}|[A-Z]\w*|\d\w*))?", page):
        values = re.findall(r"[\w-]+", listed) if listed.startswith("{") else []
        takes[option] = values if listed else takes.get(option)
    return takes


def _first_words(command: str, page: str) -> list[str]:
    """Words that a command may begin with: trainers, loops, or those in braces or between strokes on its page."""
    if command == "new":
        return list(loops())
    if command in OF_TRAINERS:
        return [*TRAINERS, *(["report"] if command == "tune" else [])]
    listed = re.match(r"usage: rl-fn \w+ (?:\[-h\] )?\{?(\w+(?:(?:,| \| )\w+)+)", page)
    return re.findall(r"\w+", listed[1]) if listed else []
