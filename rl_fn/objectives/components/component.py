"""What every component of an Objective declares of itself; what nobody declared has the default that loses nothing.

Components are frozen dataclasses and not tuples, because tuples of different classes compare equal when their fields
do, and jit would then mistake one objective for another.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from rl_fn._numerics import Number, Range, numbers, require
from rl_fn.aggregation import MODES
from rl_fn.objectives.batch import Batch

BEHAVIOURS = ("rollout", "old")


def shown(value: Any) -> str:
    """Return a constant for an explanation; a traced number has no digits yet."""
    if isinstance(value, Tracer):
        return "(traced)"
    return value if isinstance(value, str) else f"{float(value):g}"


def check_numbers(legal: Range, **values: Number | None) -> None:
    """Raise ValueError for a constant outside its range; None is no constant, and what is traced is not looked at."""
    numbers(jnp.dtype(jnp.float32), legal, **{name: value for name, value in values.items() if value is not None})


def constants_of(component: Any) -> dict[str, Any]:
    """Return a component's fields by name."""
    return {field.name: getattr(component, field.name) for field in dataclasses.fields(component)}


_accepted: set[Hashable] = set()
MOST_ACCEPTED = 4096


_PLAIN = (bool, int, float, str, type(None))


def _plain(value: Any) -> bool:
    """Return whether a constant is a number or a text that nobody can change, or a tuple of these."""
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_plain, value)))


def _with_type(value: Any) -> tuple[Any, ...]:
    """Return a value with its type, and those of its parts: 1 and True are equal."""
    return type(value), tuple(map(_with_type, value)) if isinstance(value, tuple) else value


def check_once(component: Any, check: Callable[[], Any]) -> None:
    """Run the check of a component's constants, which traces its function, unless equal ones have passed before.

    Only the library's own components with plain constants are remembered: a user's class may read what is no field.
    """
    kind = type(component)
    constants = constants_of(component).values() if kind.__module__.startswith("rl_fn.") else ()
    if not constants or not all(map(_plain, constants)):
        check()
        return
    key = (kind, vars(kind).get("function"), *map(_with_type, constants))
    if key not in _accepted:
        check()
        if len(_accepted) >= MOST_ACCEPTED:  # a schedule makes new constants in every step
            _accepted.clear()
        _accepted.add(key)


class Component:
    """A part of an objective with an equation, in which {field} stands for the value of a field.

    slots: the fields of an Objective that take it.
    """

    equation: ClassVar[str]
    slots: ClassVar[tuple[str, ...]] = ()

    def explain(self) -> str:
        """Return the equation with its constants."""
        constants = constants_of(self).items()
        return self.equation.format(**{name: shown(value) for name, value in constants if value is not None})


class PerToken(Component):
    """A component called with a Batch that returns one number per token: a loss, or a correction's weights.

    required_fields: what it reads of a batch beyond logprobs, old_logprobs, advantages and mask.
    accepts_packed: rows may hold several sequences (batch.segment_ids); False refuses them.
    over_batch: a statistic of all tokens passed in decides, so that micro-batches do not add up to the batch.
    gradient_without_advantage: there may be a gradient where the advantage is 0.
    weighs_rollout: a function of π/μ or π_old/μ is a factor already.
    sequence_level: every token holds the loss of its whole sequence.
    modes: the aggregations that keep the paper's meaning.
    """

    slots = ("loss", "correction")
    required_fields: tuple[str, ...] = ()
    accepts_packed: bool = False
    over_batch: bool = True
    gradient_without_advantage: bool = True
    weighs_rollout: bool = False
    sequence_level: bool = False
    modes: tuple[str, ...] = MODES

    def __call__(self, batch: Batch) -> jax.Array:
        """Return one number per token."""
        raise NotImplementedError

    def clipped(self, batch: Batch) -> jax.Array | None:
        """Return the tokens whose gradient a clip cuts, for the metric; None without a clip."""
        del batch
        return None


@dataclasses.dataclass(frozen=True)
class Custom(PerToken):
    """Any function of a Batch as a loss or a correction, with what is known of it; see PerToken for the fields."""

    function: Callable[[Batch], jax.Array]
    required_fields: tuple[str, ...] = ()
    accepts_packed: bool = False
    over_batch: bool = True
    gradient_without_advantage: bool = True
    weighs_rollout: bool = False
    sequence_level: bool = False
    modes: tuple[str, ...] = MODES

    def __post_init__(self) -> None:
        check_function("function", self.function, "a function of a Batch", PerToken.slots)
        if isinstance(self.required_fields, str):
            raise TypeError(f"required_fields is a tuple of names, as ('ref_logprobs',), {got(self.required_fields)}")
        unknown = [name for name in self.required_fields if name not in Batch._fields]
        require(not unknown, f"required_fields names {unknown}; a Batch has {', '.join(Batch._fields)}")

    def __call__(self, batch: Batch) -> jax.Array:
        """Return one number per token."""
        with naming_errors(self.explain):
            return self.function(batch)

    def explain(self) -> str:
        """Return the function's name."""
        return getattr(self.function, "__name__", repr(self.function))


@contextlib.contextmanager
def naming_errors(function: Callable[[], str]) -> Iterator[None]:
    """Add a function's name to an error inside the function: a run shows the name where the traceback is not."""
    try:
        yield
    except Exception as error:
        note = f"in the function {function()} of an objective"
        if note not in getattr(error, "__notes__", ()):  # the error may be one object that is raised again
            error.add_note(note)
        raise


def got(value: Any) -> str:
    """Return a value as the end of a message; a class in words, for it is often meant to be called."""
    return f"got the class {value.__name__}, not an object" if isinstance(value, type) else f"got {value!r}"


def check_function(name: str, value: Any, expected: str, slots: tuple[str, ...]) -> None:
    """Raise TypeError for what cannot be called as a user's own function, or is a component of other slots."""
    misplaced = isinstance(value, Component) and not set(slots) & set(value.slots)
    if misplaced or isinstance(value, type) or not callable(value):
        raise TypeError(f"{name} is {expected}, {got(value)}")


def per_token(
    component: Any, slots: tuple[str, ...] = PerToken.slots, required_fields: tuple[str, ...] = ()
) -> PerToken:
    """Return a component as it is, and a plain function of a Batch as Custom with the safe defaults."""
    name = " or ".join(slots)
    check_function(name, component, f"a {name} component or a function of a Batch", slots)
    return component if isinstance(component, PerToken) else Custom(component, required_fields)


class Known(PerToken):
    """A loss or a correction of the library, whose constants its function checks."""

    accepts_packed = True
    over_batch = False
    gradient_without_advantage = False

    def __post_init__(self) -> None:
        # The function's own checks of its hyper-parameters, when the component is made and not at the first batch.
        row, mask = (jax.ShapeDtypeStruct((1,), dtype) for dtype in (jnp.float32, jnp.bool_))

        def loss(x: jax.Array, m: jax.Array) -> jax.Array:
            return self(Batch(x, x, x, m, rollout_logprobs=x, entropies=x, correct=m))

        check_once(self, lambda: jax.eval_shape(loss, row, mask))


class FunctionLoss(Known):
    """A loss function: the component's fields are its hyper-parameters.

    reads: the fields of a batch that are its positional arguments. segments: it takes segment_ids.
    """

    slots = ("loss",)
    function: ClassVar[Callable[..., jax.Array]]
    reads: tuple[str, ...] = ("logprobs", "old_logprobs", "advantages", "mask")
    segments: ClassVar[bool] = False

    def constants(self) -> dict[str, Any]:
        """Return the keyword arguments of the function."""
        return constants_of(self)

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the loss per token."""
        packed = {"segment_ids": batch.segment_ids} if self.segments else {}
        arrays = (getattr(batch, name) for name in self.reads)
        return type(self).function(*arrays, **self.constants(), **packed)


@dataclasses.dataclass(frozen=True)
class BehaviourLoss(FunctionLoss):
    """A loss whose ratio is to the policy that sampled: rollout_logprobs, or old_logprobs with behaviour "old"."""

    behaviour: str = dataclasses.field(default="rollout", kw_only=True)

    def __post_init__(self) -> None:
        require(self.behaviour in BEHAVIOURS, f"behaviour must be one of {BEHAVIOURS}, got {self.behaviour!r}")
        super().__post_init__()

    @property
    def required_fields(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """rollout_logprobs, unless the ratio is to π_old."""
        return ("rollout_logprobs",) if self.weighs_rollout else ()

    @property
    def weighs_rollout(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the ratio is to μ."""
        return self.behaviour == "rollout"

    def constants(self) -> dict[str, Any]:
        """Return the keyword arguments of the function."""
        return {name: value for name, value in super().constants().items() if name != "behaviour"}

    @property
    def reads(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The ratio is to rollout_logprobs or to old_logprobs."""
        return "logprobs", f"{self.behaviour}_logprobs", "advantages", "mask"


def joined(parts: tuple[PerToken, ...]) -> dict[str, Any]:
    """Return what several components together declare: each flag as the most careful of them has it."""
    every = [set(part.modes) for part in parts]
    return {
        "required_fields": tuple(dict.fromkeys(name for part in parts for name in part.required_fields)),
        "accepts_packed": all(part.accepts_packed for part in parts),
        "over_batch": any(part.over_batch for part in parts),
        "gradient_without_advantage": any(part.gradient_without_advantage for part in parts),
        "weighs_rollout": any(part.weighs_rollout for part in parts),
        "sequence_level": any(part.sequence_level for part in parts),
        "modes": tuple(mode for mode in MODES if all(mode in modes for modes in every)),
    }


@dataclasses.dataclass(frozen=True)
class Several(PerToken):
    """Components that act together, in the order given; what they declare is joined."""

    parts: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, tuple | list):
            raise TypeError(f"a {type(self).__name__} is made of a tuple of components, {got(self.parts)}")
        require(len(self.parts) > 0, f"a {type(self).__name__} must have a component")
        object.__setattr__(self, "parts", tuple(per_token(part, self.slots) for part in self.parts))
        # Attributes, not fields: they follow from the parts and take no part in comparisons.
        for name, value in joined(self.parts).items():
            object.__setattr__(self, name, value)
