"""The words behind ``rl-fn train TRAINER``: in the order that tyro reads, and refused in plain words.

What tyro says of a word that is left over is the word alone, in a box, without what was meant.
"""

import re
import typing
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from rl_bridge.run.run_toml import RUN_FILE, dashed
from rl_tools.trainer_options import OWN, TRAINERS, TrainerOptions, did_you_mean, in_words

HELP_ALL = "--help-all"
HELP = ("-h", "--help")
_SWITCHED = ("true", "false", "yes", "no", "on", "off", "1", "0")
_DASHES = "-\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}"


def plain(word: str) -> str:
    """The name of an option on the command line, without dashes, value and the ``no-`` of a switch.

    >>> plain("--rollout.vllm.no-enforce-eager"), plain("--policy.steps=3")
    ('rollout.vllm.enforce-eager', 'policy.steps')
    """
    head, dot, last = dashed(word[2:].partition("=")[0]).rpartition(".")
    return f"{head}{dot}{last.removeprefix('no-')}"


def is_run_file(word: str) -> bool:
    """Whether a word of a command names a run file or the folder of a run."""
    return not word.startswith("-") and (word.endswith(".toml") or (Path(word) / RUN_FILE).is_file())


def in_order(words: Sequence[str], options: TrainerOptions) -> list[str]:
    """The words with the recipes behind the trainer's options, and the options of recipes at the end.

    tyro takes an option of a recipe behind the recipe's word alone, and one of the trainer not on both sides of it.
    """
    before, recipes, behind, helps = [], [], [], []
    for unit in _units(words, options):
        if unit[0] in HELP:
            helps += unit
        elif _recipe(unit[0], options) is not None:
            recipes += unit
        else:
            (before if options.of_recipe(_name(unit[0], options)) is None else behind).extend(unit)
    return [*before, *recipes, *behind, *helps]


def refusals(words: Sequence[str], options: TrainerOptions) -> list[str]:
    """Messages about words that are no option, no recipe and no value of one: what is wrong, and what was meant."""
    phrases, chosen, rest = [], {}, []
    for word in words:
        holder, colon, recipe = dashed(word).partition(":")
        if colon and (reason := options.no_recipe(holder, recipe)):
            phrases.append(reason)
            continue
        rest.append(word)
        if colon and recipe in options.recipes.get(holder, {}):
            if holder in chosen:
                phrases.append(f"{holder}:{chosen[holder]} and {holder}:{recipe}: give one of them")
            chosen[holder] = recipe
    phrases.extend(_twice(rest, options))
    for unit in _units(rest, options):
        phrases.extend(_wrong_unit(unit, options, options.defaults | chosen))
    return list(dict.fromkeys(phrases))


def without_values(words: Sequence[str], options: TrainerOptions) -> list[str]:
    """Messages about options of several values that stand without any: their default would be taken in silence."""
    return [
        f"{unit[0]} stands without a value: give one behind it, or leave the option out"
        for unit in _units(words, options)
        if len(unit) == 1 and "=" not in unit[0] and _items(options.kind(_name(unit[0], options))) is not None
    ]


def _units(words: Sequence[str], options: TrainerOptions) -> Iterator[list[str]]:
    """Each option with the words up to the next option or recipe. Words in front of all options are a unit too."""

    def begins(word: str) -> bool:
        one_dash = word[:1] in _DASHES and not word.startswith("--") and options.exact(word.lstrip(_DASHES)) != []
        return word.startswith("--") or word in HELP or one_dash or _recipe(word, options) is not None

    starts = [place for place, word in enumerate(words) if begins(word)]
    bounds: list[int] = [*([] if 0 in starts or not words else [0]), *starts, len(words)]
    for start, end in pairwise(bounds):
        yield list(words[start:end])


def _recipe(word: str, options: TrainerOptions) -> tuple[str, str] | None:
    holder, colon, recipe = dashed(word).partition(":")
    return (holder, recipe) if colon and recipe in options.recipes.get(holder, {}) else None


def _name(word: str, options: TrainerOptions) -> str:
    """The option that a word names; of a switch without its ``no-``."""
    whole = dashed(word[2:].partition("=")[0])
    return whole if options.kind(whole) is not None else plain(word)


def _twice(words: Sequence[str], options: TrainerOptions) -> list[str]:
    """Messages about lists and files of rows that are given twice: the first would be left out in silence."""
    given_by: dict[str, set[tuple[str, ...]]] = {}
    for unit in _units(words, options):
        if unit[0].startswith("--"):
            given_by.setdefault(_name(unit[0], options), set()).add((unit[0].partition("=")[2], *unit[1:]))
    several = {name for name, values in given_by.items() if len(values) > 1}
    lists = sorted(name for name in several if _items(options.kind(name)) is not None)
    files = ["--data is given twice, and takes one value: a pattern, as 'data/*.jsonl', has several files"]
    return [f"--{name} is given twice: give all its values behind one" for name in lists] + files * ("data" in several)


def _wrong_unit(unit: Sequence[str], options: TrainerOptions, chosen: dict[str, str]) -> list[str]:
    first, equals, value = unit[0].partition("=")
    if first in HELP or _recipe(first, options) is not None:
        return [_stray(word, options) for word in unit[1:2]]
    if not first.startswith("--"):
        return [_stray(unit[0], options)]
    name = _name(unit[0], options)
    values = [*([value] if equals else []), *unit[1:]]
    if (kind := options.kind(name)) is None:
        return [_no_option(dashed(first[2:]), values, options)] if name not in OWN else []
    if (of := options.of_recipe(name)) is not None and chosen.get(of[0]) not in of[1]:
        owners, here = ", ".join(f"{of[0]}:{recipe}" for recipe in sorted(of[1])), chosen.get(of[0], "")
        own = options.recipes[of[0]].get(here, set())
        alike = [f", which has --{other}" for other in options.elsewhere(name) if other in own]
        return [f"--{name} is of {owners}; here it is {of[0]}:{here}{''.join(alike[:1])}"]
    return _wrong_values(name, kind, values, options)


def _no_option(name: str, values: Sequence[str], options: TrainerOptions) -> str:
    """The message about an option that the trainer does not have."""
    if name in ("config", "config-file", "trainer", "recipe"):
        return (
            f"there is no --{name}: trainers and run files stand without one, as in rl-fn train sft run.toml --steps 3"
        )
    near = options.near(name)
    if near and near[0] in options.recipes:
        holder, recipes = near[0], options.recipes[near[0]]
        value = dashed(values[0]) if values else ""
        recipe = (
            value if value in recipes else next(iter(options.near_recipes(holder, value)), options.defaults[holder])
        )
        return f"--{name}: write {holder}:{recipe}, one word without dashes in front (there are {', '.join(recipes)})"
    return did_you_mean(f"--{name}", [f"--{other}" for other in near])


def _wrong_values(name: str, kind: Any, values: Sequence[str], options: TrainerOptions) -> list[str]:
    items = _items(kind)
    if kind is bool:
        if values and values[0].lower() in _SWITCHED:
            head, dot, last = name.rpartition(".")
            return [f"--{name} takes no value, got {values[0]!r}: --{name} is yes, and --{head}{dot}no-{last} is no"]
        if values and name == "resume":
            return [f"--resume takes no value, got {values[0]!r}: a run is found by --output FOLDER and --name RUN"]
        return [_stray(word, options) for word in values[:1]]
    if items is None and not values:
        return [f"--{name} needs a value behind it: {_taken(kind)}"]
    if "" in values and Path in _flat(kind):
        return [f"--{name} needs a value behind it, got an empty text"]
    misfits = [value for value in values if not _reads(value, kind)]
    if misfits and (items is not None or misfits[0] == values[0]):
        return [f"--{name} takes {_taken(kind)}, got {misfits[0]!r}{_hint(name, misfits[0], kind)}"]
    if items is None and len(values) > 1:
        return [_stray(values[1], options, name)]
    if name == "reward":
        return [_stray(word, options) for word in values if _is_elsewhere(word, options)]
    return []


def _is_elsewhere(word: str, options: TrainerOptions) -> bool:
    """Whether a word behind ``--reward`` is an option as other programs write it, and not NAME=REWARD."""
    name, equals, value = word.partition("=")
    is_reward = ":" in word or value in ("exact", "environment")  # all kinds but two have a colon: http://…#retries=0
    return bool(equals) and not is_reward and ("." in name or bool(options.exact(name)))


def _stray(word: str, options: TrainerOptions, behind: str = "") -> str:
    """The message about a word that nothing takes. ``behind``: the option of one value that stands before the word."""
    stripped, equals, value = word.lstrip(_DASHES).partition("=")
    near = options.exact(stripped)
    if near and (equals or stripped != word):
        name, recipes = near[0], options.recipes.get(near[0], {})
        as_recipe = f"{name}:{dashed(value) if dashed(value) in recipes else 'NAME'}"
        return f"{word!r}: write {as_recipe if recipes else f'--{name} {value}'.rstrip()}"
    recipe = dashed(word).lower()
    if holders := [holder for holder, recipes in options.recipes.items() if recipe in recipes]:
        return f"{word!r}: write {holders[0]}:{recipe}"
    if word in TRAINERS:
        return f"{word!r} is a trainer, and a command has one: rl-fn train {word} …"
    if is_run_file(word):
        return f"{word!r}: run files stand in front of all options, as in rl-fn train {word} --seed 3"
    if behind:
        return f"--{behind} takes one value, and {word!r} is one more"
    return f"{word!r} is no option: options are written --NAME VALUE (underscores and dashes are the same)"


def _items(kind: Any) -> Any:
    """The type of one value of an option of several; None for another option."""
    if typing.get_origin(kind) is tuple:
        return typing.get_args(kind)[0]
    parts = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, UnionType) else ()
    return next((items for part in parts if (items := _items(part)) is not None), None)


def _reads(text: str, kind: Any) -> bool:
    """Whether a word is of a type with numbers. Words of all other types are left to tyro."""
    kinds = set(_flat(kind))
    numbers = kinds & {int, float}
    if not numbers or kinds & {str, Path} or text in map(str, kinds - numbers - {NoneType}):
        return True
    try:
        (float if float in numbers else int)(text)
    except ValueError:
        return text == "None" and NoneType in kinds
    return True


def _flat(kind: Any) -> Iterator[Any]:
    """The types of a union and of an option's several values, and the values of a Literal."""
    if typing.get_origin(kind) in (typing.Union, UnionType, tuple):
        for part in typing.get_args(kind):
            if part is not Ellipsis:
                yield from _flat(part)
    elif typing.get_origin(kind) is typing.Literal:
        yield from typing.get_args(kind)
    else:
        yield kind


def _taken(kind: Any) -> str:
    """The value or values of a type in words."""
    items = _items(kind)
    words = in_words(kind) if items is None else f"one or more values, each {in_words(items)}"
    return words.replace("true or false", "True or False")  # the words of an option that may be None as well


def _hint(name: str, text: str, kind: Any) -> str:
    """The way on from a word that is no number: spaces in place of commas, a point, or a study of several values."""
    parts = text.split(",")
    if len(parts) > 1 and all(_reads(part.strip(), float) for part in parts):
        if _items(kind) is not None:
            return f"; several stand apart: --{name} {' '.join(part.strip() for part in parts)}"
        if re.fullmatch(r"-?\d+,\d+", text):
            return f"; with a decimal point it is {text.replace(',', '.')}"
        return f"; a study tries several values: rl-fn tune with --space.{name} {text}"
    if _reads(text, float) and (number := float(text)).is_integer():
        return f"; write {int(number)}"
    return ""
