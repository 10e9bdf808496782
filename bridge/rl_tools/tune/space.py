"""The search space: ranges, choices, conditions; read for the options of a training command, and written as its words.

An option that belongs to some recipes applies with these recipes only.
"""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rl_bridge.run.run_toml import dashed
from rl_tools.trainer_options import TrainerOptions

Value = float | int | str
Assignment = dict[str, Value]
"""Parameter → value, of the parameters that apply."""


@dataclass(frozen=True)
class Interval:
    """The numbers from ``low`` to ``high``, both included; ``whole`` are integers, ``log`` is uniform in the logarithm.

    >>> Interval(1e-5, 1e-3, log=True).at(0.5)
    0.0001
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        """Refuse a range that is empty, infinite, or has no logarithm."""
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"a range goes from a number to a larger one, got {self.low:g}..{self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"a range with log: begins above 0, got {self.low:g}..{self.high:g}")
        if self.whole and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise ValueError(f"a range of integers ends with integers, got {self.low:g}..{self.high:g}")

    def at(self, share: float) -> Value:
        """The value at a share from 0 to 1 of the range, with six digits as in the trial's command line."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = low + (high - low) * share
        return self.rounded(math.exp(value) if self.log else value)

    def rounded(self, value: float) -> Value:
        """A value of the range that is near: an integer, or six digits."""
        value = round(value) if self.whole else float(f"{value:.6g}")
        bounded = min(max(value, self.low), self.high)
        return int(bounded) if self.whole else float(bounded)

    def points(self, count: int) -> list[Value]:
        """Values at equal distances, the ends among them; of integers no value twice."""
        shares = [0.5] if count == 1 else [i / (count - 1) for i in range(count)]
        return list(dict.fromkeys(self.at(share) for share in shares))


@dataclass(frozen=True)
class Choice:
    """Words of the command line."""

    values: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse values that leave no choice."""
        if len(self.values) < 2 or len(set(self.values)) < len(self.values) or "" in self.values:
            raise ValueError(f"a choice has two different values or more, got {','.join(self.values)!r}")

    def points(self, count: int) -> list[Value]:
        """All values, whatever ``count`` is."""
        return list(self.values)


@dataclass(frozen=True)
class Parameter:
    """A named domain. ``when``: (another parameter, its values with which this one applies); None always applies."""

    name: str
    domain: Interval | Choice
    when: tuple[str, tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Space:
    """Parameters; one with a condition stands behind the one that it depends on."""

    parameters: tuple[Parameter, ...]

    def __post_init__(self) -> None:
        """Refuse an empty space, names that are there twice, and conditions on anything but an earlier choice."""
        earlier: dict[str, Parameter] = {}
        for parameter in self.parameters:
            if parameter.name in earlier:
                raise ValueError(f"{parameter.name} is there twice")
            if parameter.when is not None:
                other = earlier.get(parameter.when[0])
                if other is None or not isinstance(other.domain, Choice):
                    raise ValueError(f"{parameter.name} depends on {parameter.when[0]}, which is no choice before it")
            earlier[parameter.name] = parameter
        if not earlier:
            raise ValueError("there is nothing to search: give a --space.OPTION DOMAIN")

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self.parameters)

    def applies(self, parameter: Parameter, values: Mapping[str, Value]) -> bool:
        """Whether a parameter has a meaning beside these values."""
        return parameter.when is None or values.get(parameter.when[0]) in parameter.when[1]

    def active(self, values: Mapping[str, Value]) -> Assignment:
        """The values without those of parameters that do not apply."""
        active: Assignment = {}
        for parameter in self.parameters:
            if self.applies(parameter, active):
                active[parameter.name] = values[parameter.name]
        return active

    def described(self) -> list[dict[str, Any]]:
        """The space as JSON."""
        return [asdict(p) | {"domain": {"kind": type(p.domain).__name__} | asdict(p.domain)} for p in self.parameters]


_RANGE = re.compile(r"((?:log:|int:)*)([^.,]+(?:\.[^.,]+)?)\.\.(.+)")
_NUMBER = r"([-+]?[\d.]*\d(?:e[-+]?\d+)?)"
_RANGE_ELSEWHERE = re.compile(
    rf"(?:log:|int:)+{_NUMBER} *, *{_NUMBER}|(?:log:|int:)*(?:\w*uniform)?"
    rf"(?:[(\[] *{_NUMBER} *, *{_NUMBER} *[)\]]|{_NUMBER} *(?:-|:|to|\.{{3,}}) *{_NUMBER})",
    re.IGNORECASE,
)
"""Two numbers as other programs write a range."""


def parse_domain(text: str, *, whole: bool = False) -> Interval | Choice:
    """A domain as it is written: ``log:1e-5..1e-3``, ``int:1..8``, ``0..1``, or ``a,b,c``.

    ``whole``: a range is one of integers, whether it says so or not.

    >>> parse_domain("log:1e-5..1e-3")
    Interval(low=1e-05, high=0.001, log=True, whole=False)
    >>> parse_domain("gspo,dapo")
    Choice(values=('gspo', 'dapo'))

    Raises:
        ValueError: neither a range nor a choice.
    """
    if other := _RANGE_ELSEWHERE.fullmatch(text):
        low, high = filter(None, other.groups())
        log = "log:" if text.lower().startswith("log") and float(low) > 0 else ""
        raise ValueError(f"{text!r} is no range: {log}{low}..{high} is one, and {low},{high} a choice")
    match = _RANGE.fullmatch(text)
    if match is None:
        if ".." in text or text.startswith(("log:", "int:")):
            raise ValueError(f"{text!r} is no range: log:1e-5..1e-3, int:1..8, 0.5..1")
        return Choice(tuple(text.split(",")))
    kinds, low, high = match.groups()
    try:
        ends = float(low), float(high)
    except ValueError:
        raise ValueError(f"{text!r} is no range: its ends are numbers") from None
    return Interval(*ends, log="log:" in kinds, whole=whole or "int:" in kinds)


JOINT = "+"
"""``a+b`` with the values ``1+2,3+4`` sets two options together."""


def read_space(words: Mapping[str, str], options: TrainerOptions, fixed: Sequence[str]) -> Space:
    """The space of ``--space.NAME DOMAIN`` words; ``fixed`` are the trial's other words.

    A recipe's own option applies with the recipes that have it; ``objective:gspo.clip-high`` is that of one recipe.

    Raises:
        ValueError: an unknown name, a domain that cannot be, an option that is fixed besides.
    """
    parameters: list[Parameter] = []
    fixed_names = {word[2:].partition("=")[0] for word in map(dashed, fixed) if word.startswith("--")}
    fixed_recipes = dict(dashed(word).split(":", 1) for word in fixed if word.split(":", 1)[0] in options.recipes)
    # Recipes first: an option that applies with some of them stands behind them.
    _require_once(words)
    ordered = sorted(words, key=lambda word: plain(word)[0] not in options.recipes)
    recipes = [word for word in ordered if word in options.recipes]
    searched = {word: dashed(words[word]).split(",") for word in recipes}
    for word in ordered:
        name, recipe = plain(word)
        for part in name.split(JOINT):
            options.require(part)
            if part in fixed_names or part in fixed_recipes:
                raise ValueError(f"--{part} is fixed and searched: give it once")
        whole = JOINT not in name and options.kinds.get(name) is int
        try:
            domain = parse_domain(dashed(words[word]) if name in options.recipes else words[word], whole=whole)
        except ValueError as error:
            raise ValueError(f"--space.{word}: {error}") from None
        if JOINT in name:
            _require_joint(word, name, domain)
        if name in options.recipes:
            _require_recipes(name, domain, options.recipes[name])
        parameters.append(Parameter(word, domain, _condition(name, recipe, options, searched, fixed_recipes)))
    return Space(tuple(parameters))


def _require_once(words: Iterable[str]) -> None:
    """Refuse an option that two of the words propose: the last one's value alone would count."""
    proposed: dict[tuple[str, str | None], str] = {}
    for word in words:
        name, recipe = plain(word)
        for part in name.split(JOINT):
            others = [other for (option, of), other in proposed.items() if option == part and None in (of, recipe)]
            if (other := proposed.get((part, recipe), others[0] if others else None)) is not None:
                both = f"--space.{other} and --space.{word}" if other != word else f"--space.{word}"
                raise ValueError(f"{both}: --{part} is searched twice; give it once")
            proposed[part, recipe] = word


def plain(word: str) -> tuple[str, str | None]:
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


def _require_recipes(name: str, domain: Any, recipes: Iterable[str]) -> None:
    values = domain.values if isinstance(domain, Choice) else [str(domain)]
    for value in values:
        if value not in recipes:
            near = difflib.get_close_matches(value, recipes, n=3, cutoff=0.4)
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
    holder, owners = of_recipe
    if recipe is not None:
        if recipe not in owners:
            raise ValueError(f"{holder}:{recipe} has no option --{name}; {', '.join(sorted(owners))} have it")
        owners = {recipe}
    offered = searched.get(holder) or [fixed.get(holder) or options.defaults[holder]]
    applicable = tuple(value for value in offered if value in owners)
    if not applicable:
        raise ValueError(f"--{name} is of {', '.join(sorted(owners))}; here {holder} is {', '.join(offered)}")
    return (holder, applicable) if holder in searched and len(applicable) < len(offered) else None


def words_of(assignment: Assignment, options: TrainerOptions, fixed: Sequence[str]) -> list[str]:
    """The words of a trial's training command. A recipe's word comes first: its own options have to stand behind it."""
    recipes, others, needed = [], [], {}
    for word, value in assignment.items():
        name, _ = plain(word)
        if name in options.recipes:
            recipes.append(f"{name}:{value}")
            continue
        values = str(value).split(JOINT) if JOINT in name else [written(value)]
        for part, text in zip(name.split(JOINT), values, strict=True):
            others += [f"--{part}", text]
            if (of_recipe := options.of_recipe(part)) is not None:
                needed[of_recipe[0]] = options.defaults.get(of_recipe[0])
    named = {word.split(":", 1)[0] for word in [*recipes, *fixed]}
    recipes += [f"{holder}:{default}" for holder, default in needed.items() if holder not in named]
    return [*recipes, *fixed, *others]


def written(value: Value) -> str:
    """A value as a word of a command line."""
    return value if isinstance(value, str) else repr(value)


def corners(space: Space) -> list[Assignment]:
    """Assignments that have every end of every range and every choice in them, few of them."""
    count = max([2, *(len(p.domain.values) for p in space if isinstance(p.domain, Choice))])
    assignments = []
    for i in range(count):
        row = {p.name: (v := p.domain.points(2))[i % len(v)] for p in space}
        assignments.append(space.active(row))
    return assignments
