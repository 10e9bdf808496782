"""What every piece of an Objective has: an equation to show, and the fields of a batch that it reads.

Pieces are frozen dataclasses and not tuples, because tuples of different classes compare equal when their fields do,
and jit would then mistake one objective for another.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from rl_fn.aggregation import MODES
from rl_fn.objectives.batch import Batch

ALWAYS = ("logprobs", "old_logprobs", "advantages", "mask")
BEHAVIOURS = ("rollout", "old")


def describe(piece: Any) -> str:
    """Return a piece's equation if it has one, else its name."""
    explain = getattr(piece, "explain", None)
    return explain() if explain is not None else getattr(piece, "__name__", repr(piece))


def read_by(piece: Any, default: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the fields that a piece needs beyond those of every batch; `default` for a plain function."""
    return tuple(getattr(piece, "reads", default))


@dataclasses.dataclass(frozen=True)
class FunctionLoss:
    """A loss of the library as a piece: its fields are the function's hyper-parameters, which the function checks.

    sequence: every token holds the loss of its whole sequence. over_batch: a statistic of all tokens passed in decides,
    so that micro-batches do not add up to the batch. beside_advantage: it has a gradient where the advantage is 0.
    weighs_rollout: it already multiplies by a function of π/μ or
    π_old/μ. modes: the aggregations that keep the paper's meaning.
    """

    function: ClassVar[Callable[..., jax.Array]]
    packs: ClassVar[bool] = False
    sequence: ClassVar[bool] = False
    over_batch: ClassVar[bool] = False
    beside_advantage: ClassVar[bool] = False
    modes: ClassVar[tuple[str, ...]] = MODES

    def __post_init__(self) -> None:
        # The function's own checks of its hyper-parameters, when the piece is made and not at the first batch.
        row, mask = (jax.ShapeDtypeStruct((1,), dtype) for dtype in (jnp.float32, jnp.bool_))
        jax.eval_shape(lambda x, m: self(Batch(x, x, x, m, rollout_logprobs=x)), row, mask)

    @property
    def reads(self) -> tuple[str, ...]:
        """Fields of the batch beyond those that every batch has."""
        return ()

    @property
    def weighs_rollout(self) -> bool:
        """Whether π/μ or π_old/μ is a factor already."""
        return False

    def constants(self) -> dict[str, Any]:
        """Return the keyword arguments of the function."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _behind(self, batch: Batch) -> Any:
        return batch.old_logprobs

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the loss per token."""
        packed = {"segment_ids": batch.segment_ids} if self.packs else {}
        arrays = (batch.logprobs, self._behind(batch), batch.advantages, batch.mask)
        return type(self).function(*arrays, **self.constants(), **packed)


@dataclasses.dataclass(frozen=True)
class BehaviourLoss(FunctionLoss):
    """A loss whose ratio is to the policy that sampled: rollout_logprobs, or old_logprobs with behaviour "old"."""

    behaviour: str = dataclasses.field(default="rollout", kw_only=True)

    def __post_init__(self) -> None:
        if self.behaviour not in BEHAVIOURS:
            raise ValueError(f"behaviour must be one of {BEHAVIOURS}, got {self.behaviour!r}")
        super().__post_init__()

    @property
    def reads(self) -> tuple[str, ...]:
        """rollout_logprobs, unless the ratio is to π_old."""
        return ("rollout_logprobs",) if self.weighs_rollout else ()

    @property
    def weighs_rollout(self) -> bool:
        """Whether the ratio is to μ."""
        return self.behaviour == "rollout"

    def constants(self) -> dict[str, Any]:
        """Return the keyword arguments of the function."""
        return {name: value for name, value in super().constants().items() if name != "behaviour"}

    def _behind(self, batch: Batch) -> Any:
        return batch.rollout_logprobs if self.weighs_rollout else batch.old_logprobs

    def symbol(self) -> str:
        """Return the name of the policy under the ratio."""
        return "rollout_logprobs" if self.weighs_rollout else "old_logprobs"
