"""The options of an objective: one class an algorithm, made from its recipe, and the terms that all of them share."""

import inspect
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import tyro

import rl_fn
from rl_bridge.messages import given
from rl_bridge.pipelines.terms import AggregationOptions, CorrectionOptions, EntropyOptions, KLOptions, with_terms
from rl_fn import components


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """What every algorithm takes. A subclass has the constants of one recipe besides."""

    kl: KLOptions = KLOptions()
    entropy: EntropyOptions = EntropyOptions()
    correction: CorrectionOptions = CorrectionOptions()
    aggregation: AggregationOptions = AggregationOptions()
    dynamic_sampling: bool | None = None
    """Leave groups whose rewards are all equal out of the update and of its denominator. None is the recipe's."""
    dual_clip: float | None = None
    """Bound of a clipped loss where the advantage is negative, above 1. None is the recipe's."""
    value_clip: float | None = None
    """A critic's values are held so near those of before the update, in units of reward. None is the recipe's."""
    algorithm: str = field(default="", init=False)

    def build(self) -> rl_fn.Objective:
        """The recipe with these constants and terms."""
        shared = {option.name for option in fields(ObjectiveOptions)}
        constants = {option.name: getattr(self, option.name) for option in fields(self) if option.name not in shared}
        terms = {name: getattr(self, name) for name in ("kl", "entropy", "correction", "aggregation")}
        try:
            objective = with_terms(getattr(rl_fn.recipes, self.algorithm)(**constants), terms)
        except ValueError as error:
            # A constant may have another name in the part of the objective that refuses its value.
            defaults = {option.name: option.default for option in fields(self)}
            if changed := [name for name, value in constants.items() if value != defaults[name]]:
                raise ValueError(f"{error} ({self.algorithm} with {given(self, *changed)})") from error
            raise
        if self.dynamic_sampling is not None:
            sampling = objective.dynamic_sampling or components.DynamicSampling()
            objective = objective.replace(dynamic_sampling=sampling if self.dynamic_sampling else None)
        if self.dual_clip is not None:
            if "dual_clip" not in {constant.name for constant in fields(objective.loss)}:
                raise ValueError(f"the loss of {self.algorithm} has no dual_clip: {objective.loss}")
            objective = objective.replace(loss=replace(objective.loss, dual_clip=self.dual_clip))
        if self.value_clip is not None:
            if objective.value is None:
                raise ValueError(f"{self.algorithm} has no critic: value_clip is for ppo and vapo")
            objective = objective.replace(value=replace(objective.value, clip=self.value_clip))
        return objective


def _option_type(annotation: Any) -> Any:
    """The type of an option on the command line: of what a recipe takes, arrays cannot be written there."""
    choices = typing.get_args(annotation) or (annotation,)
    optional = type(None) in choices
    if typing.get_origin(annotation) is Literal or annotation in (bool, int, str):
        return annotation
    if any((typing.get_origin(choice) or choice) is Sequence for choice in choices):
        base: Any = tuple[float, ...]
    else:
        base = str if str in choices else float if float in choices else int
    return base | None if optional else base


def _options(algorithm: str) -> type[ObjectiveOptions]:
    """A dataclass with the recipe's constants, their defaults and its help."""
    recipe = getattr(rl_fn.recipes, algorithm)
    constants = [
        (name, _option_type(parameter.annotation), field(default=parameter.default))
        for name, parameter in inspect.signature(recipe, eval_str=True).parameters.items()
    ]
    named: Any = ("algorithm", str, field(default=algorithm, init=False))
    return make_dataclass(
        f"{algorithm}_options",
        [*constants, named],
        bases=(ObjectiveOptions,),
        frozen=True,
        kw_only=True,
        # The recipe's own doctest runs where the recipe is.
        namespace={"__doc__": (inspect.getdoc(recipe) or "").partition("\n>>>")[0], "__module__": __name__},
    )


ALGORITHMS = {name: _options(name) for name in rl_fn.recipes.__all__}
# What is pickled is found again by its name in this module.
globals().update({options.__name__: options for options in ALGORITHMS.values()})


def objective_options(algorithm: str, **options: Any) -> ObjectiveOptions:
    """The options of an algorithm by its name.

    >>> objective_options("gspo", clip_high=0.001, kl=KLOptions(coef=0.01)).build().kl
    KL(estimator='k3', coef=0.01)
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}; there is: {', '.join(sorted(ALGORITHMS))}")
    return ALGORITHMS[algorithm](**options)


def _first_line(options: type[ObjectiveOptions]) -> str:
    return (options.__doc__ or "").partition("\n")[0]


if TYPE_CHECKING:
    Algorithm = ObjectiveOptions
else:
    # A sub-command each: objective:gspo.
    Algorithm = Union[  # noqa: UP007
        tuple(
            Annotated[options, tyro.conf.subcommand(name, description=_first_line(options))]
            for name, options in ALGORITHMS.items()
        )
    ]
