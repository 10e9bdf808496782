"""The trainers of ``rl-fn train``: where their configs are, and a config from a command line."""

import difflib
import os
import sys
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any

from rl_bridge.common.terminal import remark, say
from rl_bridge.run.options import in_vain
from rl_bridge.run.run_toml import NONE, RUN_FILE, Setting, dashed, read_run_files
from rl_tools.command_words import HELP, HELP_ALL, in_order, is_run_file, plain, refusals, without_values
from rl_tools.new import loops
from rl_tools.trainer_options import TRAINERS, TrainerOptions, algorithms, did_you_mean, in_words, load, options_of

if TYPE_CHECKING:
    from rl_bridge.run.options import RunOptions
    from rl_bridge.run.run import Observer


class NoTrainer(ValueError):
    """Words that name no trainer. The command ends with status 2, as for a wrong option."""


def parse(default: Any, words: Sequence[str], *, prog: str) -> Any:
    """The config of a command line.

    ``default``: a config, a function of the words that returns one, or its class. Options may stand before and behind
    a recipe in any order. The process ends with status 2 for a wrong option.
    """
    import tyro
    from tyro import _errors

    default = default(words) if callable(default) and not isinstance(default, type) else default
    # Help stands in docstrings: without the last, tyro reads the source of every class for comments, at every start.
    config = (tyro.conf.CascadeSubcommandArgs, tyro.conf.HelptextFromCommentsOff)
    options = options_of(default)
    helps = HELP_ALL in words or not {*HELP}.isdisjoint(words)
    ordered = in_order([options.recipe_dashed(word) for word in words], options)
    settings: Any = {"args": ["--help"] if HELP_ALL in words else ordered, "prog": prog, "config": config}
    if not isinstance(default, type):
        settings["default"] = default

    def refuse_value(event: Any) -> None:
        """Say what tyro would say in a box, of a value of another type aside: its box has the option's help."""
        _refuse(_refusal(sys.exception() if isinstance(event, _errors.InstantiationFailure) else None))

    try:
        _refuse([] if helps else refusals(words, options))
        with _errors.on_parse_error(refuse_value):
            return tyro.cli(default if isinstance(default, type) else type(default), **settings)
    except SystemExit as left:
        if left.code not in (None, 0):
            say(f"all options: rl-fn train {prog.rpartition(' ')[2]} {HELP_ALL}", error=True)
        raise


def _refuse(phrases: Sequence[str]) -> None:
    """End the process with status 2 where there is anything to say of its words."""
    if phrases:
        say(f"rl-fn: error: {'; '.join(phrases)}", error=True)
        raise SystemExit(2)


def _refusal(error: BaseException | None) -> list[str]:
    """The words of a class that refuses its options, behind the options' part; none for a value of another type.

    ``error``: as tyro has it, whose box would name the class of the command's options.
    """
    if isinstance(error, ValueError):
        return [str(error)]
    part = getattr(error, "arg", None)
    return [f"{dashed(part)}: {getattr(error, 'message', error)}"] if isinstance(part, str) else []


def config_of(words: Sequence[str], command: str) -> tuple[str, Any]:
    """The trainer and its config, of the words behind ``rl-fn COMMAND``. See ``expanded`` and ``parse``.

    Options that nothing reads beside the others are remarked on, by the first rank of a job alone.
    """
    name, options = expanded(words)
    default = load(TRAINERS[name].default)
    if not any(map(is_run_file, words)):  # over a file's list an option without a value says that there is none
        _refuse(without_values(options, options_of(default if isinstance(default, type) else default(options))))
    config = parse(default, options, prog=f"rl-fn {command} {name}")
    if os.environ.get("RANK", "0") == "0":
        remark_on_vain(config, default, options)
    return name, config


def remark_on_vain(config: Any, default: Any, words: Sequence[str]) -> None:
    """Say which options nothing reads beside the others. ``default``: as ``parse`` has it."""
    for message in in_vain(config, default() if isinstance(default, type) else default(words)):
        remark(message)


def expanded(words: Sequence[str], without: Collection[str] = ()) -> tuple[str, list[str]]:
    """The trainer and its options, of words that may begin with run files: ``[TRAINER] FILE.toml… [options]``.

    An algorithm stands for the trainer that has it: ``grpo`` for ``policy objective:grpo``, ``dpo`` for
    ``preference loss:dpo``. A later file lies over an earlier one, and the options lie over all files. A folder
    stands for its run.toml. ``without``: options of the files that are not taken over.

    Raises:
        NoTrainer: there is none, or an algorithm that is the folder of a run as well.
        ValueError: two of them, a file that cannot be read, or an option in a file that the trainer does not have or
            whose value is of another type.
    """
    names, recipes, rest = _trainer_in_front(words)
    files = []
    while rest and is_run_file(rest[0]):
        path = Path(rest.pop(0))
        files.append(path / RUN_FILE if path.is_dir() else path)
    settings = read_run_files(files)
    of_files = settings.pop("trainer", None)
    if of_files is not None:
        if str(of_files.value) not in TRAINERS:
            name = dashed(str(of_files.value)).lower()
            trainer, holder = algorithms().get(name, (name, ""))
            hint = f'; write trainer = "{trainer}"' if trainer in TRAINERS else ""
            hint += f' and {holder}.name = "{name}"' if holder else ""
            raise ValueError(
                f"{of_files.file}: trainer must be one of {', '.join(TRAINERS)}, got {of_files.value!r}{hint}"
            )
        if names and names != [of_files.value]:
            raise ValueError(f"{of_files.file} is of the trainer {of_files.value}, not of {names[0]}")
        names = [of_files.value]
    if not names:
        raise NoTrainer(_without_trainer(files, rest))
    settings = {name: setting for name, setting in settings.items() if name not in without}
    # In front of all options: behind one without a value a recipe would be this value.
    rest = [*recipes, *rest]
    return names[0], words_of_settings(names[0], settings, rest) if settings else rest


def _trainer_in_front(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """(The trainer that the words begin with, the recipe where they begin with an algorithm, the words behind these).

    Raises:
        NoTrainer: the word is an algorithm, and the folder of a run beside the command, too.
    """
    if not words or words[0].startswith("-"):
        return [], [], list(words)
    first, *rest = words
    if first in TRAINERS:
        return [first], [], rest
    name = dashed(first).lower()
    is_file = is_run_file(first)
    if is_file and first in algorithms():
        raise NoTrainer(
            f"{first!r} is an algorithm, and here the folder of a run: write {os.path.join('.', first)} for the run, "
            f"or {' '.join(_with_trainer(first))}"
        )
    if not is_file and name in TRAINERS:
        return [name], [], rest
    if is_file or name not in algorithms():
        return [], [], list(words)
    trainer, recipe = _with_trainer(name)
    return [trainer], [recipe], rest


def _with_trainer(algorithm: str) -> tuple[str, str]:
    """The two words that an algorithm stands for.

    >>> _with_trainer("dpo")
    ('preference', 'loss:dpo')
    """
    trainer, holder = algorithms()[algorithm]
    return trainer, f"{holder}:{algorithm}"


def _without_trainer(files: Sequence[Path], words: Sequence[str]) -> str:
    """The message about words that begin with neither a trainer nor a run file that names one."""
    names = ", ".join(TRAINERS)
    if files:
        return f"{', '.join(map(str, files))} has no key 'trainer': give it, one of {names}"
    if (place := next((i for i, word in enumerate(words) if _begins(word)), 0)) > 0:
        ahead = " ".join([words[place], *words[:place], *words[place + 1 :]])
        return f"give a trainer or run file in front of all options: {ahead}"
    if not words or words[0].startswith("-"):
        return f"give a trainer, one of {names}"
    if (loop := words[0].lower()) in loops():
        option = f"policy {_OF_LOOPS[loop]} trains so, and " if loop in _OF_LOOPS else ""
        return f"{words[0]!r} is a loop, and no trainer ({names}): {option}rl-fn new {loop} FILE.py writes the loop"
    near = difflib.get_close_matches(dashed(words[0]).lower(), [*TRAINERS, *algorithms()])
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{words[0]!r} is no trainer ({names}), no run file (FILE.toml) and no folder with {RUN_FILE}{hint}"


_OF_LOOPS = {
    "ahead": "--asynchronous.max-staleness 1",
    "conversations": "--environment FILE.py:NAME",
    "own_loss": "--objective.loss FILE.py:NAME",
    "own_model": "--model FILE.py:NAME",
}
"""Options by which a trainer is the loop that has no trainer of its own."""


def _begins(word: str) -> bool:
    """Whether a command may begin with a word."""
    return word in TRAINERS or is_run_file(word) or word in algorithms()


def words_of_settings(trainer: str, settings: Mapping[str, Setting], words: Sequence[str]) -> list[str]:
    """The words of a command with the options of run files, over which ``words`` lie.

    Raises:
        ValueError: see ``expanded``.
    """
    default = load(TRAINERS[trainer].default)
    options = options_of(default if isinstance(default, type) else default(()))
    on_command_line = {plain(word) for word in words if word.startswith("--")}
    parts = (word.partition(":") for word in words)
    chosen = {holder: recipe for holder, _, recipe in parts if holder in options.recipes}
    last = {
        holder: dashed(str(settings[name].value))
        for holder in options.recipes
        for name in (holder, f"{holder}.name")
        if name in settings
    } | chosen
    recipes: dict[str, Any] = {}
    of_files: list[str] = []
    unread: dict[str, list[str]] = {}
    for key, setting in settings.items():
        holder, recipe = key.removesuffix(".name"), dashed(str(setting.value))
        of_recipe = options.of_recipe(key)
        if key not in options.kinds and of_recipe is None:
            if reason := options.no_recipe(holder, recipe):
                raise ValueError(f"{setting.file}: {reason}")
            if holder in options.recipes:
                recipes[holder] = recipe
                continue
            if part := [name for name in options.names() if name.startswith(f"{key}.")]:
                raise ValueError(f"{setting.file}: {key} is a table, with {part[0]} and others; got {setting.value!r}")
            raise ValueError(f"{setting.file}: {did_you_mean(key, options.near(key))}")
        if of_recipe is not None and _is_of_another(key, setting, of_recipe[0], options, last):
            unread.setdefault(f"{setting.file}: of {of_recipe[0]} {setting.names[of_recipe[0]]}", []).append(key)
        elif key not in on_command_line:
            kind = options.kinds[key] if of_recipe is None else options.of_recipes[key]
            of_files += _words_of_value(key, setting, kind)
            if of_recipe is not None:
                recipes.setdefault(of_recipe[0], options.defaults.get(of_recipe[0]))
    for whose, keys in unread.items():
        remark(f"{whose}, in whose place there is another one, {', '.join(keys)} are not read")
    named = [f"{holder}:{recipe}" for holder, recipe in recipes.items() if holder not in chosen]
    return [*of_files, *named, *words]


def _is_of_another(key: str, setting: Setting, holder: str, options: TrainerOptions, last: Mapping[str, str]) -> bool:
    """Whether an option is a constant of a recipe in whose place another one has come, from a later file or a word.

    Options that all recipes have, as the KL penalty's, are of none of them. ``last``: the recipes that are taken.
    """
    own = setting.names.get(holder)
    of_all = all(key in names for names in options.recipes[holder].values())
    return own is not None and not of_all and dashed(str(own)) != last[holder]


def _words_of_value(key: str, setting: Setting, kind: Any) -> list[str]:
    """The words of one option.

    Raises:
        ValueError: the value is not of its type.
    """
    value = setting.value
    if not _fits(value, kind):
        raise ValueError(f"{setting.file}: {key} must be {in_words(kind)}, got {value!r}")
    if isinstance(value, bool) and kind is bool:  # one that may be None as well takes a word
        head, dot, last = key.rpartition(".")
        return [f"--{key}" if value else f"--{head}{dot}no-{last}"]
    if isinstance(value, list) and len(value) != 1:
        if dashes := [item for item in value if isinstance(item, str) and item.startswith("-")]:
            raise ValueError(f"{setting.file}: {key} has several texts, and {dashes[0]!r} begins as an option does")
        return [f"--{key}", *map(str, value)]
    if isinstance(value, list):
        return [f"--{key}={value[0]}"]
    return [f"--{key}={value}"]


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of a TOML file is one of an option's type."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return any(value == part and type(value) is type(part) for part in parts)
    if origin in (typing.Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is tuple:
        return isinstance(value, list) and all(_fits(item, parts[0]) for item in value)
    if kind is NoneType:
        return value == NONE
    types = {bool: bool, int: int, float: (int, float)}.get(kind, str)
    return isinstance(value, types) and (kind is bool or not isinstance(value, bool))


def observers_of(options: "RunOptions") -> "list[Observer]":
    """The observers that options ask for: trackers, samples of the machine, the memory profiler.

    Raises:
        ModuleNotFoundError: a tracker is not installed.
    """
    observers: list[Observer] = []
    if options.tracker_names() or options.system_every:
        from rl_tools.export import live

        names, place = options.tracker_names(), (options.tracker_output, options.tracker_project)
        observers.append(live.Exporters(live.live_export(names, *place, options.system_every)))
    if options.memory:
        from rl_tools.profile.profiler import MemoryProfiler

        observers.append(MemoryProfiler())
    return observers
