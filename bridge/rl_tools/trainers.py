"""The trainers of ``rl-fn train``: where their configs are, and a config from a command line."""

import dataclasses
import difflib
import importlib
import os
import sys
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any

from rl_bridge.common.terminal import remark, say
from rl_bridge.run.options import in_vain
from rl_bridge.run.run_toml import NONE, RUN_FILE, Setting, dashed, is_fixed, read_run_files

if TYPE_CHECKING:
    from rl_bridge.run.options import RunOptions
    from rl_bridge.run.run import Observer


@dataclass(frozen=True)
class Trainer:
    """A line of ``rl-fn train``'s table. Nothing of a trainer is loaded before ``load``."""

    default: str
    """``module:name`` of a function that returns the default config, or of the config's class."""
    run: str
    """``module:name`` of the function (config, observers) that runs a config to its end and returns the summary.

    ``summary["result"]`` is one sentence about the run, and ``summary["seconds"]`` its time.
    """
    about: str


class NoTrainer(ValueError):
    """Words that name no trainer. The command ends with status 2, as for a wrong option."""


TRAINERS = {
    "sft": Trainer(
        "rl_train.sft:SFTPipeline",
        "rl_train.sft:run_sft",
        "supervised fine-tuning on conversations, or prompts with responses; the best model on held-out rows is "
        "exported.",
    ),
    "reward-model": Trainer(
        "rl_train.reward_model:RewardModelPipeline",
        "rl_train.reward_model:run_reward_model",
        "a model that scores completions, from pairs or ranked lists; loss:plackett-luce is for lists.",
    ),
    "preference": Trainer(
        "rl_train.preference:PreferencePipeline",
        "rl_train.preference:run_preference",
        "a policy from preferred and rejected completions: DPO. loss:simpo takes SimPO with its own options.",
    ),
    "policy": Trainer(
        "rl_train.policy_configs:policy",
        "rl_train.policy:run_policy",
        "post-training on groups of completions; without options: GRPO with DAPO's loss on two-digit arithmetic "
        "and a tiny model (the quickstart). objective:gspo takes GSPO with its own options.",
    ),
}


def parse(default: Any, words: Sequence[str], *, prog: str) -> Any:
    """The config of a command line.

    ``default``: a config, a function of the words that returns one, or its class. The options of the pipeline may stand
    before and after the algorithm's sub-command. The process ends with status 2 for a wrong option.
    """
    import tyro
    from tyro import _errors

    default = default(words) if callable(default) and not isinstance(default, type) else default
    # Help stands in docstrings: without the last, tyro reads the source of every class for comments, at every start.
    config = (tyro.conf.CascadeSubcommandArgs, tyro.conf.HelptextFromCommentsOff)
    options = options_of(default)
    words = [options.recipe_dashed(word) for word in words]
    settings: Any = {"args": ["--help"] if HELP_ALL in words else words, "prog": prog, "config": config}
    if not isinstance(default, type):
        settings["default"] = default

    def refuse(event: Any) -> None:
        """Say what tyro would say in a box, of a value of another type aside: its box has the option's help."""
        failure = sys.exception() if isinstance(event, _errors.InstantiationFailure) else None
        if phrases := options.unknown(words) or _refusal(failure):
            say(f"rl-fn: error: {'; '.join(phrases)}", error=True)
            raise SystemExit(2)

    try:
        # tyro takes a misspelt recipe behind an option of several values for one more value.
        if any(options.no_recipe(*dashed(word).partition(":")[::2]) for word in words if ":" in word):
            refuse(None)
        with _errors.on_parse_error(refuse):
            return tyro.cli(default if isinstance(default, type) else type(default), **settings)
    except SystemExit as left:
        if left.code not in (None, 0):
            say(f"all options: rl-fn train {prog.rpartition(' ')[2]} {HELP_ALL}", error=True)
        raise


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

    A later file lies over an earlier one, and the options lie over all files. A folder stands for its run.toml.
    ``without``: options of the files that are not taken over.

    Raises:
        NoTrainer: there is none.
        ValueError: two of them, a file that cannot be read, or an option in a file that the trainer does not have or
            whose value is of another type.
    """
    names = list(words[:1]) if words and words[0] in TRAINERS else []
    rest = list(words[len(names) :])
    files = []
    while rest and is_run_file(rest[0]):
        path = Path(rest.pop(0))
        files.append(path / RUN_FILE if path.is_dir() else path)
    settings = read_run_files(files)
    of_files = settings.pop("trainer", None)
    if of_files is not None:
        if of_files.value not in TRAINERS:
            raise ValueError(f"{of_files.file}: trainer must be one of {', '.join(TRAINERS)}, got {of_files.value!r}")
        if names and names != [of_files.value]:
            raise ValueError(f"{of_files.file} is of the trainer {of_files.value}, not of {names[0]}")
        names = [of_files.value]
    if not names:
        raise NoTrainer(_without_trainer(files, rest))
    settings = {name: setting for name, setting in settings.items() if name not in without}
    return names[0], words_of_settings(names[0], settings, rest) if settings else rest


def _without_trainer(files: Sequence[Path], words: Sequence[str]) -> str:
    """The message about words that begin with neither a trainer nor a run file that names one."""
    names = ", ".join(TRAINERS)
    if files:
        return f"{', '.join(map(str, files))} has no key 'trainer': give it, one of {names}"
    if not words or words[0].startswith("-"):
        return f"give a trainer, one of {names}"
    near = difflib.get_close_matches(words[0], TRAINERS)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{words[0]!r} is no trainer ({names}), no run file (FILE.toml) and no folder with {RUN_FILE}{hint}"


def is_run_file(word: str) -> bool:
    """Whether a word of a command names a run file or the folder of a run."""
    return not word.startswith("-") and (word.endswith(".toml") or (Path(word) / RUN_FILE).is_file())


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
    recipes, before, behind = {}, [], []
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
            raise ValueError(f"{setting.file}: {_did_you_mean(key, options.near(key))}")
        if of_recipe is not None and _is_of_another(key, setting, of_recipe[0], options, last):
            unread.setdefault(f"{setting.file}: of {of_recipe[0]} {setting.names[of_recipe[0]]}", []).append(key)
        elif key not in on_command_line:
            kind = options.kinds[key] if of_recipe is None else options.of_recipes[key]
            (before if of_recipe is None else behind).extend(_words_of_value(key, setting, kind))
            if of_recipe is not None:
                recipes.setdefault(of_recipe[0], options.defaults.get(of_recipe[0]))
    for whose, keys in unread.items():
        remark(f"{whose}, in whose place there is another one, {', '.join(keys)} are not read")
    # An option of a recipe has to stand behind the recipe's word.
    named = [f"{holder}:{recipe}" for holder, recipe in recipes.items() if holder not in chosen]
    return [*before, *named, *words, *behind]


def _is_of_another(key: str, setting: Setting, holder: str, options: "TrainerOptions", last: Mapping[str, str]) -> bool:
    """Whether an option is a constant of a recipe in whose place another one has come, from a later file or a word.

    Options that all recipes have, as the KL penalty's, are of none of them. ``last``: the recipes that are taken.
    """
    own = setting.names.get(holder)
    of_all = all(key in names for names in options.recipes[holder].values())
    return own is not None and not of_all and dashed(str(own)) != last[holder]


def plain(word: str) -> str:
    """The name of an option on the command line, without dashes, value and the ``no-`` of a switch.

    >>> plain("--rollout.vllm.no-enforce-eager"), plain("--policy.steps=3")
    ('rollout.vllm.enforce-eager', 'policy.steps')
    """
    head, dot, last = dashed(word[2:].partition("=")[0]).rpartition(".")
    return f"{head}{dot}{last.removeprefix('no-')}"


def _words_of_value(key: str, setting: Setting, kind: Any) -> list[str]:
    """The words of one option.

    Raises:
        ValueError: the value is not of its type.
    """
    value = setting.value
    if not _fits(value, kind):
        raise ValueError(f"{setting.file}: {key} must be {_in_words(kind)}, got {value!r}")
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


def _in_words(kind: Any) -> str:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " or ".join(map(repr, parts))
    if origin in (typing.Union, UnionType):
        return " or ".join(_in_words(part) for part in parts if part is not NoneType)
    if origin is tuple:
        return f"an array, each {_in_words(parts[0])}"
    words = {bool: "true or false", int: "a whole number", float: "a number"}
    return words.get(kind, "a text")


def choices_of(kind: Any) -> str:
    """The values of an option in a few letters: ``{float32,bfloat16}``, ``INT``, ``TEXT...``."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return "{" + ",".join(map(str, parts)) + "}"
    if origin in (typing.Union, UnionType):
        return "|".join(choices_of(part) for part in parts if part is not NoneType)
    if origin is tuple:
        return f"{choices_of(parts[0])}..."
    return {bool: "", int: "INT", float: "NUMBER"}.get(kind, "TEXT")


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


def load(place: str) -> Any:
    """The object that ``module:name`` names."""
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


HELP_ALL = "--help-all"
OWN = ("seed", "name", "output", "resume", "resume-anyway", "dry-run")
"""Options of a trainer that the study sets itself."""
_SHORT = {"lr": "learning-rate", "bs": "prompts-per-step", "epoch": "epochs", "wd": "weight-decay", "gpus": "mesh"}
_SHORT |= {"responses-per-prompt": "sampling.n"}
"""Last part of an option's name in other programs, or of an older name here → its name here."""


@dataclass
class TrainerOptions:
    """The options of a trainer, by their names on the command line without the dashes in front."""

    kinds: dict[str, Any] = field(default_factory=dict)
    """Option → its type."""
    recipes: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    """Option that takes a recipe → recipe → options that this recipe has. ``objective`` → ``gspo`` → …"""
    defaults: dict[str, str] = field(default_factory=dict)
    """Option that takes a recipe → its default recipe."""
    of_recipes: dict[str, Any] = field(default_factory=dict)
    """Option of a recipe → its type; the union of them where recipes differ."""

    def of_recipe(self, name: str) -> tuple[str, set[str]] | None:
        """(The option that takes recipes, the recipes that have this option); None where it belongs to no recipe."""
        for holder, recipes in self.recipes.items():
            owners = {recipe for recipe, options in recipes.items() if name in options}
            if owners:
                return holder, owners
        return None

    def recipe_dashed(self, word: str) -> str:
        """A recipe's word as tyro has it; every other word as it is."""
        holder, _, recipe = dashed(word).partition(":")
        return dashed(word) if recipe in self.recipes.get(holder, {}) else word

    def require(self, name: str) -> None:
        """Refuse a name that is no option.

        Raises:
            ValueError: the message has the nearest names.
        """
        if name in OWN:
            raise ValueError(f"--{name} is the study's own: it cannot be searched")
        if name in self.recipes or name in self.kinds or self.of_recipe(name) is not None:
            return
        near = self.near(name)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"the trainer has no option --{name}{hint}")

    def near(self, name: str) -> list[str]:
        """Options with a name like this one."""
        names = dict.fromkeys([*self.recipes, *self.names()])
        head, dot, last = name.rpartition(".")
        name_in_full = f"{head}{dot}{_SHORT.get(last, last)}"
        if dot and last in names:
            return [last]  # behind a part that this trainer does not have: sft.steps is steps
        if name_in_full in names:
            return [name_in_full]
        return difflib.get_close_matches(name_in_full, names, n=3, cutoff=0.5)

    def names(self) -> list[str]:
        """All options that take no recipe; those of recipes last."""
        return [
            *self.kinds,
            *(name for recipes in self.recipes.values() for options in recipes.values() for name in options),
        ]

    def no_recipe(self, holder: str, recipe: str) -> str:
        """Why HOLDER:RECIPE is none of this trainer; nothing where it is one, or where no trainer has such a holder."""
        word, own = f"{holder}:{recipe}", self.recipes.get(holder, {})
        if recipe in own:
            return ""
        elsewhere = _trainers_with(holder)
        owners = [name for name, recipes in elsewhere.items() if recipe in recipes] or ([] if own else list(elsewhere))
        if owners:
            here = ", ".join(f"{part}:{name}" for part, names in self.recipes.items() for name in names)
            others = ", ".join(f"train {name}" for name in owners)
            return f"{word} is of {others}{f'; here there are {here}' if here else ''}"
        near = [f"{holder}:{name}" for name in difflib.get_close_matches(recipe, own)]
        return _did_you_mean(word, near) if own else ""

    def unknown(self, words: Sequence[str]) -> list[str]:
        """Messages about words of a command line: unknown recipes and options, and options of another recipe."""
        options = set(self.names())
        chosen = dict(self.defaults) | {
            holder: recipe
            for holder, colon, recipe in (dashed(word).partition(":") for word in words)
            if colon and recipe in self.recipes.get(holder, {})
        }
        phrases = []
        for word in map(dashed, words):
            holder, colon, recipe = word.partition(":")
            if colon and (reason := self.no_recipe(holder, recipe)):
                phrases.append(reason)
            elif word.startswith("--"):
                name = word[2:].partition("=")[0]
                head, dot, last = name.rpartition(".")
                if not options & {name, f"{head}{dot}{last.removeprefix('no-')}"} and name not in ("help", *OWN):
                    phrases.append(_did_you_mean(f"--{name}", [f"--{near}" for near in self.near(name)]))
                elif (of_recipe := self.of_recipe(name)) is not None and chosen.get(of_recipe[0]) not in of_recipe[1]:
                    owners = ", ".join(f"{of_recipe[0]}:{recipe}" for recipe in sorted(of_recipe[1]))
                    phrases.append(f"--{name} is of {owners}; here it is {of_recipe[0]}:{chosen.get(of_recipe[0])}")
        return phrases


@lru_cache(maxsize=16)
def _trainers_with(holder: str) -> dict[str, Collection[str]]:
    """The trainers that have such recipes, each with the names of its own."""
    options = {name: options_of(load(trainer.default)()) for name, trainer in TRAINERS.items()}
    return {name: own.recipes[holder] for name, own in options.items() if holder in own.recipes}


def _did_you_mean(word: str, near: Sequence[str]) -> str:
    return f"{word}: did you mean {' or '.join(near)}?" if near else f"there is no {word}"


def options_of(config: Any) -> TrainerOptions:
    """The options of a trainer by its config: an instance, or the class."""
    options = TrainerOptions()
    _walk(config if isinstance(config, type) else type(config), config, "", options)
    return options


def _walk(kind: type, config: Any, prefix: str, options: TrainerOptions) -> None:
    hints = typing.get_type_hints(kind, include_extras=True)
    for option in dataclasses.fields(kind):
        if not option.init or is_fixed(option):
            continue
        name, hint = f"{prefix}{dashed(option.name)}", hints[option.name]
        value = None if isinstance(config, type) else getattr(config, option.name, None)
        if recipes := _recipes(hint):
            options.recipes[name] = {}
            for recipe, holder in recipes.items():
                inside = TrainerOptions()
                _walk(holder, holder, f"{name}.", inside)
                options.recipes[name][recipe] = set(inside.kinds)
                for inner, kind in inside.kinds.items():
                    options.of_recipes[inner] = typing.Union[options.of_recipes.get(inner, kind), kind]  # noqa: UP007
                if type(value) is holder or (value is None and _begins_as(option, holder)):
                    options.defaults[name] = recipe
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            _walk(hint, hint if value is None else value, f"{name}.", options)
        else:
            options.kinds[name] = hint


def _begins_as(option: dataclasses.Field, holder: type) -> bool:
    """Whether an option's default is a ``holder``."""
    if option.default_factory is not dataclasses.MISSING:
        return option.default_factory is holder or type(option.default_factory()) is holder
    return type(option.default) is holder


def _recipes(hint: Any) -> dict[str, type]:
    """Name → class, of a union of sub-commands; nothing for another type."""
    classes = {}
    for part in typing.get_args(hint):
        names = [name for note in getattr(part, "__metadata__", ()) if (name := getattr(note, "name", None))]
        if names and dataclasses.is_dataclass(kind := typing.get_args(part)[0]):
            classes[dashed(names[0])] = kind
    return classes
