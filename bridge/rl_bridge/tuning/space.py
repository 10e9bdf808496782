"""The search space: ranges, choices, and parameters that apply only with some choice."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

Value = float | int | str
Assignment = dict[str, Value]
"""Parameter → value, of the parameters that apply."""


@dataclass(frozen=True)
class Interval:
    """The numbers from ``low`` to ``high``, both included; ``whole`` are integers, ``log`` is uniform in the logarithm.

    >>> Interval(1e-5, 1e-3, log=True).at(0.5)
    0.0001
    >>> Interval(1, 9, whole=True).position(5)
    0.5
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
        """The value at a share from 0 to 1 of the range, with six digits: what the trial's command line has."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = low + (high - low) * share
        return self.rounded(math.exp(value) if self.log else value)

    def rounded(self, value: float) -> Value:
        """A value of the range that is near: an integer, or six digits."""
        value = round(value) if self.whole else float(f"{value:.6g}")
        bounded = min(max(value, self.low), self.high)
        return int(bounded) if self.whole else float(bounded)

    def position(self, value: Value) -> float:
        """The share that ``at`` makes into this value."""
        assert not isinstance(value, str)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def points(self, count: int) -> list[Value]:
        """Values at equal distances, the ends among them; of integers no value twice."""
        shares = [0.5] if count == 1 else [i / (count - 1) for i in range(count)]
        return list(dict.fromkeys(self.at(share) for share in shares))


@dataclass(frozen=True)
class Choice:
    """Words of the command line."""

    values: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse what leaves no choice."""
        if len(self.values) < 2 or len(set(self.values)) < len(self.values) or "" in self.values:
            raise ValueError(f"a choice has two different values or more, got {','.join(self.values)!r}")

    def at(self, share: float) -> Value:
        """The value at a share from 0 to 1 of the list."""
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]

    def position(self, value: Value) -> float:
        """A share that ``at`` makes into this value."""
        return (self.values.index(str(value)) + 0.5) / len(self.values)

    def points(self, count: int) -> list[Value]:
        """All values, whatever ``count`` is."""
        return list(self.values)


@dataclass(frozen=True)
class Parameter:
    """``when``: (another parameter, the values of it with which this one applies); None always applies."""

    name: str
    domain: Interval | Choice
    when: tuple[str, tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Space:
    """Parameters; one with a condition stands behind the one that it depends on."""

    parameters: tuple[Parameter, ...]

    def __post_init__(self) -> None:
        """Refuse nothing to search, names that are there twice, and conditions on what is not a choice before."""
        seen: dict[str, Parameter] = {}
        for parameter in self.parameters:
            if parameter.name in seen:
                raise ValueError(f"{parameter.name} is there twice")
            if parameter.when is not None:
                other = seen.get(parameter.when[0])
                if other is None or not isinstance(other.domain, Choice):
                    raise ValueError(f"{parameter.name} depends on {parameter.when[0]}, which is no choice before it")
            seen[parameter.name] = parameter
        if not seen:
            raise ValueError("there is nothing to search: give a --space.OPTION DOMAIN")

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self.parameters)

    def applies(self, parameter: Parameter, values: Mapping[str, Value]) -> bool:
        """Whether a parameter has a meaning beside these values."""
        return parameter.when is None or values.get(parameter.when[0]) in parameter.when[1]

    def active(self, values: Mapping[str, Value]) -> Assignment:
        """The values without those of parameters that do not apply."""
        kept: Assignment = {}
        for parameter in self.parameters:
            if self.applies(parameter, kept):
                kept[parameter.name] = values[parameter.name]
        return kept

    def whole(self, assignment: Mapping[str, Value]) -> Assignment:
        """The assignment with the middle of the domain for each parameter that does not apply."""
        return {p.name: assignment.get(p.name, p.domain.at(0.5)) for p in self.parameters}

    def draw(self, generator: np.random.Generator) -> Assignment:
        """Uniform, or uniform in the logarithm."""
        return self.active({p.name: p.domain.at(float(generator.uniform())) for p in self.parameters})

    def require(self, assignment: Mapping[str, Value]) -> Assignment:
        """The assignment, checked.

        Raises:
            ValueError: a parameter is missing or not of the space, or its value is not of the domain.
        """
        known = [p.name for p in self.parameters]
        if strange := [name for name in assignment if name not in known]:
            raise ValueError(f"{strange[0]} is no parameter; there is {', '.join(known)}")
        kept = self.active(self.whole(assignment))
        for parameter in self.parameters:
            if parameter.name not in kept:
                continue
            if parameter.name not in assignment:
                raise ValueError(f"{parameter.name} has no value in {dict(assignment)}")
            value, domain = kept[parameter.name], parameter.domain
            inside = value in domain.values if isinstance(domain, Choice) else _between(value, domain)
            if not inside:
                raise ValueError(f"{parameter.name} cannot be {value!r}: {domain}")
        return kept

    def described(self) -> list[dict[str, Any]]:
        """As JSON has the space."""
        return [asdict(p) | {"domain": {"kind": type(p.domain).__name__} | asdict(p.domain)} for p in self.parameters]


def _between(value: Value, domain: Interval) -> bool:
    return not isinstance(value, str) and domain.low <= value <= domain.high


_RANGE = re.compile(r"((?:log:|int:)*)([^.,]+(?:\.[^.,]+)?)\.\.(.+)")


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
    found = _RANGE.fullmatch(text)
    if found is None:
        if ".." in text or text.startswith(("log:", "int:")):
            raise ValueError(f"{text!r} is no range: log:1e-5..1e-3, int:1..8, 0.5..1")
        return Choice(tuple(text.split(",")))
    kinds, low, high = found.groups()
    try:
        ends = float(low), float(high)
    except ValueError:
        raise ValueError(f"{text!r} is no range: its ends are numbers") from None
    return Interval(*ends, log="log:" in kinds, whole=whole or "int:" in kinds)
