"""The options of a training command: which there are, with which recipe each applies, and what a trial's words are."""

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_bridge.tuning.space import Assignment, Choice, Parameter, Space, Value, parse_domain

OWN = ("seed", "name", "output", "resume", "resume-anyway")
"""Options of a trainer that the study sets itself."""
_SHORT = {"lr": "learning-rate", "bs": "prompts-per-step", "epoch": "epochs", "wd": "weight-decay", "gpus": "mesh"}
"""What other programs call an option."""
JOINT = "+"
"""``a+b`` with the values ``1+2,3+4`` sets two options together."""


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


def read_space(words: Mapping[str, str], options: TrainerOptions, fixed: Sequence[str]) -> Space:
    """The space of ``--space.NAME DOMAIN`` words; ``fixed`` are the trial's other words.

    A recipe's own option applies with the recipes that have it; ``objective:gspo.clip-high`` is that of one recipe.

    Raises:
        ValueError: an unknown name, a domain that cannot be, an option that is fixed besides.
    """
    parameters: list[Parameter] = []
    fixed_names = {word[2:].partition("=")[0] for word in map(_dashed, fixed) if word.startswith("--")}
    fixed_recipes = dict(_dashed(word).split(":", 1) for word in fixed if word.split(":", 1)[0] in options.recipes)
    # Recipes first: what applies to one of them alone stands behind.
    ordered = sorted(words, key=lambda word: _plain(word)[0] not in options.recipes)
    recipes = [word for word in ordered if word in options.recipes]
    searched = {word: _dashed(words[word]).split(",") for word in recipes}
    for word in ordered:
        name, recipe = _plain(word)
        for part in name.split(JOINT):
            options.require(part)
            if part in fixed_names or part in fixed_recipes:
                raise ValueError(f"--{part} is fixed and searched: give it once")
        whole = JOINT not in name and options.kinds.get(name) is int
        try:
            domain = parse_domain(_dashed(words[word]) if name in options.recipes else words[word], whole=whole)
        except ValueError as error:
            raise ValueError(f"--space.{word}: {error}") from None
        if JOINT in name:
            _require_joint(word, name, domain)
        if name in options.recipes:
            _require_recipes(name, domain, options.recipes[name])
        parameters.append(Parameter(word, domain, _condition(name, recipe, options, searched, fixed_recipes)))
    return Space(tuple(parameters))


def _plain(word: str) -> tuple[str, str | None]:
    """(Option, the one recipe that it is meant for): ``objective:gspo.clip-high`` → ``objective.clip-high``, gspo."""
    holder, colon, rest = word.partition(":")
    if not colon:
        return word, None
    recipe, _, option = rest.partition(".")
    return f"{holder}.{option}", recipe


def _require_joint(word: str, name: str, domain: Any) -> None:
    parts = name.count(JOINT)
    if not isinstance(domain, Choice) or any(value.count(JOINT) != parts for value in domain.values):
        raise ValueError(f"--space.{word}: give choices of {parts + 1} values, as 1{JOINT}2,3{JOINT}4")


def _require_recipes(name: str, domain: Any, known: Iterable[str]) -> None:
    values = domain.values if isinstance(domain, Choice) else [str(domain)]
    for value in values:
        if value not in known:
            near = difflib.get_close_matches(value, known, n=3, cutoff=0.4)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"--space.{name}: there is no {name}:{value}{hint}")


def _condition(
    name: str,
    recipe: str | None,
    options: TrainerOptions,
    searched: Mapping[str, list[str]],
    fixed: Mapping[str, str],
) -> tuple[str, tuple[str, ...]] | None:
    of_recipe = options.of_recipe(name)
    if of_recipe is None:
        return None
    holder, having = of_recipe
    if recipe is not None:
        if recipe not in having:
            raise ValueError(f"{holder}:{recipe} has no option --{name}; {', '.join(sorted(having))} have it")
        having = {recipe}
    offered = searched.get(holder) or [fixed.get(holder) or options.defaults[holder]]
    able = tuple(value for value in offered if value in having)
    if not able:
        raise ValueError(f"--{name} is of {', '.join(sorted(having))}; here {holder} is {', '.join(offered)}")
    return (holder, able) if holder in searched and len(able) < len(offered) else None


def words_of(assignment: Assignment, options: TrainerOptions, fixed: Sequence[str]) -> list[str]:
    """The words of a trial's training command. A recipe's word comes first: its own options have to stand behind it."""
    recipes, plain, needed = [], [], {}
    for word, value in assignment.items():
        name, _ = _plain(word)
        if name in options.recipes:
            recipes.append(f"{name}:{value}")
            continue
        values = str(value).split(JOINT) if JOINT in name else [written(value)]
        for part, text in zip(name.split(JOINT), values, strict=True):
            plain += [f"--{part}", text]
            if (of_recipe := options.of_recipe(part)) is not None:
                needed[of_recipe[0]] = options.defaults.get(of_recipe[0])
    named = {word.split(":", 1)[0] for word in [*recipes, *fixed]}
    recipes += [f"{holder}:{default}" for holder, default in needed.items() if holder not in named]
    return [*recipes, *fixed, *plain]


def written(value: Value) -> str:
    """A value as a word of a command line."""
    return value if isinstance(value, str) else repr(value)


def corners(space: Space) -> list[Assignment]:
    """Assignments that have every end of every range and every choice in them, few of them."""
    count = max([2, *(len(p.domain.values) for p in space if isinstance(p.domain, Choice))])
    found = []
    for i in range(count):
        row = {p.name: (v := p.domain.points(2))[i % len(v)] for p in space}
        found.append(space.active(row))
    return found
