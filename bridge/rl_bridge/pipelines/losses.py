"""The options of a loss of comparisons: one class a loss, made from its signature, and a sub-command each."""

import inspect
import typing
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import tyro

import rl_fn
from rl_bridge.trainers.modules.comparison_loss import (
    PREFERENCE_LOSSES,
    REWARD_LOSSES,
    ComparisonLoss,
    constants_of,
)


@dataclass(frozen=True, kw_only=True)
class RewardLossOptions:
    """A subclass has the constants of one loss."""

    loss: str = field(default="", init=False)

    def build(self) -> ComparisonLoss:
        """The loss with these constants."""
        shared = {option.name for option in fields(PreferenceLossOptions)}
        given = {option.name: getattr(self, option.name) for option in fields(self)}
        constants = {name: value for name, value in given.items() if name not in shared}
        others = {name: value for name, value in given.items() if name in shared and name != "loss"}
        return ComparisonLoss(name=self.loss, constants=constants, **others)


@dataclass(frozen=True, kw_only=True)
class PreferenceLossOptions(RewardLossOptions):
    """What every loss of a policy takes."""

    average: bool | None = None
    """The loss reads mean log-probabilities per token, not sums. None is the loss's own way."""
    wpo: bool = False
    """Weigh each comparison by how likely the policy is to write its completions (WPO)."""


def _options(name: str, base: type[RewardLossOptions]) -> type[RewardLossOptions]:
    """A dataclass with the loss's constants, their defaults and its help."""
    function = getattr(rl_fn, name)
    annotations = typing.get_type_hints(function)
    constants = [
        # Arrays cannot be written on a command line: a column of the data has one number a row.
        (option, hint if typing.get_origin(hint := annotations[option]) is Literal else float, field(default=default))
        for option, default in constants_of(name).items()
    ]
    named: Any = ("loss", str, field(default=name, init=False))
    return make_dataclass(
        f"{name}_options",
        [*constants, named],
        bases=(base,),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": inspect.getdoc(function), "__module__": __name__},
    )


LOSSES = {name: _options(name, PreferenceLossOptions) for name in PREFERENCE_LOSSES}
"""Of policies."""
REWARD_MODEL_LOSSES = {name: _options(name, RewardLossOptions) for name in REWARD_LOSSES}


def loss_options(name: str, **options: Any) -> RewardLossOptions:
    """The options of a loss by its name.

    >>> loss_options("simpo", gamma=0.5).build().constants
    {'beta': 2.0, 'gamma': 0.5}
    """
    known = LOSSES | REWARD_MODEL_LOSSES
    if name not in known:
        raise ValueError(f"unknown loss {name!r}; there is: {', '.join(sorted(known))}")
    return known[name](**options)


def _choice(losses: dict[str, type[RewardLossOptions]]) -> Any:
    """A sub-command each: loss:dpo."""
    return Union[  # noqa: UP007
        tuple(
            Annotated[options, tyro.conf.subcommand(name, description=(options.__doc__ or "").partition("\n")[0])]
            for name, options in losses.items()
        )
    ]


if TYPE_CHECKING:
    PreferenceLoss = RewardLossOptions
    RewardLoss = RewardLossOptions
else:
    PreferenceLoss = _choice(LOSSES)
    RewardLoss = _choice(REWARD_MODEL_LOSSES)
