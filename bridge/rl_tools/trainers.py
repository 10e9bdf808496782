"""The trainers of ``rl-fn train``: where their configs are, and a config from a command line."""

import dataclasses
import difflib
import importlib
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_bridge.common.terminal import say

if TYPE_CHECKING:
    from rl_bridge.run.options import RunOptions
    from rl_bridge.run.run import Observer


@dataclass(frozen=True)
class Trainer:
    """A line of ``rl-fn train``'s table. Nothing of a trainer is loaded before it is asked for."""

    default: str
    """``module:name`` of a function that returns the default config, or of the config's class."""
    run: str
    """``module:name`` of the function (config, observers) that runs a config to its end and returns the summary.

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
        "rl_bridge.pipelines.comparison:RewardModelPipeline",
        "rl_bridge.pipelines.comparison:run_reward_model",
        "a model that scores completions, from pairs or ranked lists; loss:plackett-luce is for lists.",
    ),
    "preference": Trainer(
        "rl_bridge.pipelines.comparison:PreferencePipeline",
        "rl_bridge.pipelines.comparison:run_preference",
        "a policy from preferred and rejected completions: DPO. loss:simpo takes SimPO with its own options.",
    ),
    "policy": Trainer(
        "rl_bridge.pipelines.policy_configs:policy",
        "rl_bridge.pipelines.policy:run_policy",
        "post-training on groups of completions; without options: GRPO with DAPO's loss on two-digit arithmetic "
        "and a tiny model (the quickstart). objective:gspo takes GSPO with its own options.",
    ),
}


def parse(default: Any, words: Sequence[str], *, prog: str) -> Any:
    """The config that a command line describes.

    ``default``: a config, a function of the words that returns one, or its class. The options of the pipeline may stand
    before and after the algorithm's sub-command. The process ends with status 2 for every option that cannot be.
    """
    import tyro

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
    """What ``module:name`` names."""
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


OWN = ("seed", "name", "output", "resume", "resume-anyway")
"""Options of a trainer that the study sets itself."""
_SHORT = {"lr": "learning-rate", "bs": "prompts-per-step", "epoch": "epochs", "wd": "weight-decay", "gpus": "mesh"}
"""What other programs call an option."""


@dataclass
class TrainerOptions:
    """Names as the command line has them, without the dashes in front."""

    kinds: dict[str, Any] = field(default_factory=dict)
    """Option → its type."""
    recipes: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    """Option that takes a recipe → recipe → options that this recipe has. ``objective`` → ``gspo`` → …"""
    defaults: dict[str, str] = field(default_factory=dict)
    """Option that takes a recipe → the recipe without a word."""

    def of_recipe(self, name: str) -> tuple[str, set[str]] | None:
        """(The option that takes recipes, the recipes that have this option); None for an option of all."""
        for holder, recipes in self.recipes.items():
            having = {recipe for recipe, options in recipes.items() if name in options}
            if having:
                return holder, having
        return None

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
        known = [*self.recipes, *self.kinds, *(o for r in self.recipes.values() for names in r.values() for o in names)]
        head, dot, last = name.rpartition(".")
        wanted = f"{head}{dot}{_SHORT.get(last, last)}"
        return difflib.get_close_matches(wanted, dict.fromkeys(known), n=3, cutoff=0.5)

    def no_recipe(self, word: str) -> bool:
        """Whether a word of a command line has the form of a recipe, and there is none of that name."""
        holder, colon, recipe = _dashed(word).partition(":")
        return bool(colon) and holder in self.recipes and recipe not in self.recipes[holder]

    def unknown(self, words: Sequence[str]) -> list[str]:
        """A phrase for each of a command line's words that is no recipe and no option, or that of another recipe."""
        known = {*self.kinds, *(o for r in self.recipes.values() for names in r.values() for o in names)}
        taken = dict(self.defaults) | {
            holder: recipe
            for holder, colon, recipe in (_dashed(word).partition(":") for word in words)
            if colon and recipe in self.recipes.get(holder, {})
        }
        found = []
        for word in map(_dashed, words):
            holder, _, recipe = word.partition(":")
            if self.no_recipe(word):
                near = [f"{holder}:{name}" for name in difflib.get_close_matches(recipe, self.recipes[holder])]
                found.append(_did_you_mean(word, near))
            elif word.startswith("--"):
                name = word[2:].partition("=")[0]
                head, dot, last = name.rpartition(".")
                if not known & {name, f"{head}{dot}{last.removeprefix('no-')}"} and name not in ("help", *OWN):
                    found.append(_did_you_mean(f"--{name}", [f"--{near}" for near in self.near(name)]))
                elif (of_recipe := self.of_recipe(name)) is not None and taken.get(of_recipe[0]) not in of_recipe[1]:
                    able = ", ".join(f"{of_recipe[0]}:{recipe}" for recipe in sorted(of_recipe[1]))
                    found.append(f"--{name} is of {able}; here it is {of_recipe[0]}:{taken.get(of_recipe[0])}")
        return found


def _did_you_mean(word: str, near: Sequence[str]) -> str:
    return f"{word}: did you mean {' or '.join(near)}?" if near else f"there is no {word}"


def options_of(config: Any) -> TrainerOptions:
    """The options of a trainer by its config: an instance, or the class."""
    found = TrainerOptions()
    _walk(config if isinstance(config, type) else type(config), config, "", found)
    return found


def _walk(kind: type, config: Any, prefix: str, found: TrainerOptions) -> None:
    hints = typing.get_type_hints(kind, include_extras=True)
    for option in dataclasses.fields(kind):
        if not option.init:
            continue
        name, hint = f"{prefix}{_dashed(option.name)}", hints[option.name]
        value = None if isinstance(config, type) else getattr(config, option.name, None)
        if recipes := _recipes(hint):
            found.recipes[name] = {}
            for recipe, holder in recipes.items():
                inside = TrainerOptions()
                _walk(holder, holder, f"{name}.", inside)
                found.recipes[name][recipe] = set(inside.kinds)
                if type(value) is holder or (value is None and _made(option, holder)):
                    found.defaults[name] = recipe
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            _walk(hint, hint if value is None else value, f"{name}.", found)
        else:
            found.kinds[name] = hint


def _made(option: dataclasses.Field, holder: type) -> bool:
    """Whether an option of a class begins as a ``holder``."""
    if option.default_factory is not dataclasses.MISSING:
        return option.default_factory is holder or type(option.default_factory()) is holder
    return type(option.default) is holder


def _recipes(hint: Any) -> dict[str, type]:
    """Name → class, of a union of sub-commands; nothing for another type."""
    found = {}
    for part in typing.get_args(hint):
        names = [name for about in getattr(part, "__metadata__", ()) if (name := getattr(about, "name", None))]
        if names and dataclasses.is_dataclass(kind := typing.get_args(part)[0]):
            found[_dashed(names[0])] = kind
    return found


def _dashed(name: str) -> str:
    """A name as the command line has it."""
    return name.replace("_", "-")
