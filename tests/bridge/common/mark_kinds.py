"""Kinds of values that a function of a user's may have beside its file, each with two contents.

``python -m tests.bridge.common.mark_kinds WAY`` prints the marks of all as JSON. By the way "back", sets and mappings
are filled in the other order: their content is the same.
"""

import datetime
import decimal
import enum
import functools
import io
import json
import random
import re
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch

from rl_bridge.common.user_marks import mark_of

SECRET = "correct horse battery"
"""Stands in most values, and in no mark."""
IS_BACK = sys.argv[1:] == ["back"]


def mapping(**items: Any) -> dict[str, Any]:
    names = sorted(items, reverse=IS_BACK)
    return {name: items[name] for name in names}


def filled(*items: Any) -> set[Any]:
    return set(items[::-1] if IS_BACK else items)


@dataclass
class Scorer:
    """With a field that the first call sets, and one that does not count."""

    scale: Any
    client: Any = field(init=False)
    calls: int = field(default=0, compare=False)

    def score(self, completion, row):
        return self.scale

    def __call__(self, completion, row):
        return self.scale


@dataclass(slots=True)
class Slotted:
    scale: Any
    unset: Any = field(init=False)


@dataclass
class Node:
    """Of a tree whose parts know the whole."""

    value: Any
    parent: Any = None
    children: list["Node"] = field(default_factory=list)


class Named(NamedTuple):
    a: Any
    b: Any


class Level(enum.Enum):
    LOW = 0
    HIGH = 1


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Loud:
    """No method of these can be called."""

    def __repr__(self):
        raise ZeroDivisionError

    def __getattr__(self, name):
        raise ZeroDivisionError(name)


class Stubborn(dict):
    def items(self):
        raise ZeroDivisionError


class Text(str):
    __slots__ = ()


def function(*values, **named):
    return 1.0


def other(*values, **named):
    return 1.0


def closure(value):
    def inner(completion, row):
        return value

    return inner


def itself(value):
    def inner(completion, row):
        return inner if value else value

    return inner


def decorated(value):
    def decorator(wrapped):
        @functools.wraps(wrapped)
        def wrapper(*arguments):
            return value, wrapped(*arguments)

        return wrapper

    return decorator(function)


def unset():
    def inner(completion, row):
        return later

    if inner is None:
        later = 1  # the cell stays empty
    return inner


def ring(x):
    """Everyone leads to everyone."""
    nodes = [Node(f"{SECRET} {n}") for n in range(30)]
    for node in nodes:
        node.children = nodes
    nodes[7].value = x
    return nodes[0]


def tree(x):
    root = Node(SECRET)
    root.children = [Node(n, root) for n in range(3)]
    root.children[1].children = [Node(x, root.children[1])]
    return root


def twins(x):
    """Each list holds the one before twice."""
    value: Any = [x]
    for _ in range(50):
        value = [value, value]
    return value


def filled_array(kind, x):
    values = kind(2000)
    values[1000] = x
    return values


def objects(x):
    values = np.empty(3, dtype=object)
    values[:] = [SECRET, filled("a", "b", f"c{x}"), None]
    return values


def looped(x):
    value: list[Any] = [SECRET, x]
    value.append(value)
    return value


KINDS: dict[str, Callable[[int], Any]] = {
    "a truth": lambda x: [True, False][x],
    "a number": lambda x: 0.5 + x,
    "a large number": lambda x: 10**5000 + x,
    "a decimal": lambda x: decimal.Decimal(x),
    "a fraction": lambda x: Fraction(1, 2 + x),
    "a date": lambda x: datetime.datetime(2026, 1, 1 + x),
    "a range": lambda x: range(3 + x),
    "a text": lambda x: f"{SECRET} {x}",
    "a long text": lambda x: SECRET * 900 + str(x),
    "a broken text": lambda x: f"\ud800{x}",
    "a text of its own": lambda x: Text(f"{SECRET} {x}"),
    "bytes": lambda x: f"{SECRET} {x}".encode(),
    "many bytes": lambda x: bytearray(f"{SECRET * 900} {x}".encode()),
    "a view": lambda x: memoryview(f"{SECRET} {x}".encode()),
    "text for a number": lambda x: [1, "1"][x],
    "a list for a mapping": lambda x: [[], {}][x],
    "a list": lambda x: [*range(5000), x],
    "a tuple": lambda x: (SECRET, (x,)),
    "a named tuple": lambda x: Named(SECRET, x),
    "a queue": lambda x: deque([SECRET, x]),
    "a set": lambda x: filled("alpha", "beta", "gamma", f"delta {x}"),
    "a set of sets": lambda x: filled(frozenset(filled("a", "b", "c")), frozenset(filled("d", "e", f"f{x}"))),
    "a mapping": lambda x: mapping(password=SECRET, b=1, c=x),
    "a mapping's key": lambda x: mapping(**{SECRET.replace(" ", "_"): 1, f"b{x}": 2}),
    "a key of another type": lambda x: {[1, "1"][x]: SECRET},
    "a key that is a set": lambda x: {frozenset(filled("a", "b", f"c{x}")): 1},
    "a nested mapping": lambda x: mapping(a=mapping(b=[1, mapping(c=x, d=filled("e", "f"))]), g=SECRET),
    "an ordered mapping": lambda x: OrderedDict(mapping(a=x, b=SECRET)),
    "a mapping to read": lambda x: MappingProxyType(mapping(a=x, b=SECRET)),
    "an array": lambda x: filled_array(np.zeros, x),
    "an array's type": lambda x: np.zeros(4, ["f4", "i4"][x]),
    "an array's shape": lambda x: np.zeros([(2, 3), (3, 2)][x]),
    "an array turned": lambda x: np.arange(6 + x).reshape(1, -1).T,
    "an array of texts": lambda x: np.array([SECRET, f"b{x}"]),
    "an array of texts of any length": lambda x: np.array([SECRET * 9, f"b{x}"], dtype=np.dtypes.StringDType()),
    "an array of objects": objects,
    "an array's element": lambda x: np.float32(x),
    "a tensor": lambda x: filled_array(torch.zeros, x),
    "a tensor in bfloat16": lambda x: filled_array(torch.zeros, x).to(torch.bfloat16),
    "a tensor's type": lambda x: torch.zeros(4, dtype=[torch.float32, torch.int32][x]),
    "a tensor's shape": lambda x: torch.zeros([(2, 0), (0, 2)][x]),
    "a tensor turned": lambda x: torch.arange(6 + x).view(1, -1).T,
    "a tensor with gradients": lambda x: (filled_array(torch.zeros, x)).requires_grad_() * 2,
    "a tensor of few": lambda x: filled_array(torch.zeros, 1 + x).to_sparse(),
    "a conjugate": lambda x: torch.complex(torch.ones(3), torch.ones(3) + x).conj(),
    "a tensor's element": lambda x: torch.tensor(x),
    "jax's array": lambda x: jnp.zeros(2000).at[1000].set(x),
    "a pattern": lambda x: re.compile(SECRET * 20 + str(x)),
    "a pattern's flags": lambda x: re.compile(SECRET, [re.IGNORECASE, re.DOTALL][x]),
    "a member": lambda x: Level(x),
    "bits": lambda x: [Bits.A, Bits.A | Bits.B][x],
    "a path": lambda x: Path(SECRET) / str(x),
    "a namespace": lambda x: SimpleNamespace(**mapping(password=SECRET, s=filled("abc", "d", "e"), x=x)),
    "a function": lambda x: [function, other][x],
    "a class": lambda x: [Scorer, Node][x],
    "a built-in function": lambda x: [min, max][x],
    "an object": lambda x: Scorer([SECRET, x]),
    "an object of another class": lambda x: [Scorer, Node][x](SECRET),
    "an object with slots": lambda x: Slotted([SECRET, x]),
    "an object of objects": lambda x: Scorer(Scorer(mapping(a=SECRET, b=Slotted(x)))),
    "a tree": tree,
    "a ring": ring,
    "twins": twins,
    "a list in itself": looped,
    "a method": lambda x: Scorer([SECRET, x]).score,
    "a method of a mapping": lambda x: mapping(a=SECRET, b=x).get,
    "a method of a text": lambda x: f"{SECRET} {x}".count,
    "a closure": lambda x: closure([SECRET, x]),
    "a closure of a closure": lambda x: closure(closure(mapping(a=SECRET, b=x))),
    "a closure of an object": lambda x: closure(Scorer(x)),
    "a function of itself": itself,
    "a decorated function": lambda x: decorated([SECRET, x]),
    "a partial": lambda x: functools.partial(function, SECRET, x),
    "a partial's name": lambda x: functools.partial(function, **{f"a{x}": SECRET}),
    "a partial of a partial": lambda x: functools.partial(functools.partial(function, SECRET), mapping(a=1, b=x)),
    "a partial of a method": lambda x: functools.partial(Scorer(x).score, SECRET),
    "a partial of a closure": lambda x: functools.partial(closure(x), SECRET),
}
"""Name → what makes a value whose content depends on 0 or 1."""
STATES: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "an object of no kind": object,
    "a generator": lambda: (n for n in range(3)),
    "an iterator": lambda: map(str, [1]),
    "numpy's random numbers": np.random.default_rng,
    "random numbers": random.Random,
    "torch's random numbers": torch.Generator,
    "a lock": threading.Lock,
    "a file": io.BytesIO,
    "a module": lambda: torch.nn.Linear(2, 2),
    "a tensor without content": lambda: torch.zeros(3, device="meta"),
    "a loud object": Loud,
    "a stubborn mapping": lambda: Stubborn(a=1),
    "an empty cell": unset,
    "deep lists": lambda: functools.reduce(lambda inner, _: [inner], range(5000), []),
}
"""Name → what makes a value that has no content to compare: an error would be one too many."""
FORMS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda value: value,
    "an argument": lambda value: functools.partial(function, value),
    "a named argument": lambda value: functools.partial(function, table=mapping(a=0, b=value)),
    "a field": Scorer,
    "a field of a method's object": lambda value: Scorer(value).score,
    "a cell": lambda value: closure([value]),
}
"""Name → how a function of the user's has a value."""


def marks() -> dict[str, list[str]]:
    """Kind and form → the marks of both contents."""
    contents = {name: [make(0), make(1)] for name, make in KINDS.items()}
    contents |= {name: [make()] for name, make in STATES.items()}
    forms = {f"{kind}, {form}": [FORMS[form](v) for v in values] for kind, values in contents.items() for form in FORMS}
    return {name: [mark_of(value) for value in values] for name, values in forms.items()}


if __name__ == "__main__":
    print(json.dumps(marks()))
