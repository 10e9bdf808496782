"""``rl-fn train TRAINER --help``: the options that most runs need, by their use; and words for a shell to complete."""

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Collection
from functools import cache
from itertools import pairwise
from typing import Any

from rl_bridge.common.terminal import say
from rl_bridge.run.options import shown
from rl_bridge.run.run_toml import dashed
from rl_tools.trainers import TRAINERS, TrainerOptions, choices_of, load, options_of

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


def short_help(trainer: str, config: Any) -> str:
    """The page of ``--help``: at most ``MOST`` options, each with its default and a sentence.

    ``config``: the trainer's default config, or its class.
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
        example = next(iter(options.recipes[holder]))
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


def completion(words: list[str], commands: Collection[str]) -> int:
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


def next_words(words: list[str], commands: Collection[str]) -> list[str]:
    """Words that may stand in the place of the last one of ``words``, which may be a part of a word."""
    before, last = words[:-1], words[-1] if words else ""
    if not before:
        candidates = [*commands, "--help", "--version"]
    elif before[0] in ("train", "plan", "tune") and len(before) == 1:
        candidates = list(TRAINERS)
    elif before[0] in ("train", "plan", "tune") and before[1] in TRAINERS:
        default = load(TRAINERS[before[1]].default)
        options = options_of(default if isinstance(default, type) else default(()))
        names = [*options.kinds, *options.of_recipes]
        recipes = [f"{holder}:{name}" for holder, names in options.recipes.items() for name in names]
        candidates = [*(f"--{name}" for name in names), *recipes, "--help", "--help-all"]
    else:
        candidates = []
    return sorted(word for word in candidates if word.startswith(last))
