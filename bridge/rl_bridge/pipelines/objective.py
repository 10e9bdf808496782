"""The options of an objective: one class an algorithm, made from its recipe, and the terms that all of them share."""

import inspect
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import tyro

import rl_fn
from rl_fn import components

NUMBER = float | None
HERE = ("rewards", "rollout_logprobs", "ref_logprobs", "entropies")
"""What a rollout with one reward a completion gives an objective."""


@dataclass(frozen=True, kw_only=True)
class KLOptions:
    """A penalty for leaving the reference. What is None is the recipe's."""

    coef: float | None = None
    """β; 0 takes the penalty away."""
    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] | None = None
    """Of the KL per token; with + it has the gradient of k2."""


@dataclass(frozen=True, kw_only=True)
class AggregationOptions:
    """How losses per token become one number. What is None is the recipe's."""

    mode: str | None = None
    """One of rl_fn.aggregate's modes."""
    max_completion_length: float | None = None
    """Tokens that seq-mean-token-sum-norm divides by."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """What every algorithm takes. A subclass has the constants of one recipe."""

    kl: KLOptions = KLOptions()
    aggregation: AggregationOptions = AggregationOptions()
    entropy_coef: float | None = None
    """Coefficient of an entropy bonus. None is the recipe's, 0 takes it away."""
    correction_cap: float | None = None
    """Cap of importance weights π_old/μ per token against the rollout's log-probabilities. None is the recipe's."""
    algorithm: str = field(default="", init=False)

    def build(self) -> rl_fn.Objective:
        """The recipe with these constants and terms."""
        shared = {option.name for option in fields(ObjectiveOptions)}
        constants = {option.name: getattr(self, option.name) for option in fields(self) if option.name not in shared}
        return self._with_terms(getattr(rl_fn.recipes, self.algorithm)(**constants))

    def _with_terms(self, objective: rl_fn.Objective) -> rl_fn.Objective:
        terms: dict[str, Any] = {}
        if self.kl != KLOptions():
            terms["kl"] = self._kl(objective.kl)
        if self.aggregation != AggregationOptions():
            given = self.aggregation
            length = given.max_completion_length
            terms["aggregation"] = components.Aggregation(
                objective.aggregation.mode if given.mode is None else given.mode,
                objective.aggregation.max_completion_length if length is None and given.mode is None else length,
            )
        if self.entropy_coef is not None:
            terms["entropy"] = components.EntropyBonus(self.entropy_coef) if self.entropy_coef else None
        if self.correction_cap is not None:
            terms["correction"] = components.TIS(self.correction_cap)
        return objective.replace(**terms) if terms else objective

    def _kl(self, kl: Any) -> Any:
        if kl is None and self.kl.coef is None:
            raise ValueError(f"{self.algorithm} has no KL penalty: give --objective.kl.coef with the estimator")
        coef = kl.coef if kl is not None and self.kl.coef is None else self.kl.coef
        estimator = kl.estimator if kl is not None and self.kl.estimator is None else self.kl.estimator
        return components.KL(estimator or "k3", coef) if coef else None


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
        namespace={"__doc__": inspect.getdoc(recipe), "__module__": __name__},
    )


ALGORITHMS = {name: _options(name) for name in rl_fn.recipes.__all__}


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


def require_rewards_alone(objective: rl_fn.Objective) -> None:
    """Refuse an objective that reads more than one reward a completion and the policies' log-probabilities."""
    shape = objective.advantage.rewards_shape
    if objective.required_rollout_fields != ("rewards",) or shape != "*batch G":
        read = [f"rewards {shape}" if name == "rewards" else name for name in objective.required_rollout_fields]
        raise ValueError(
            f"{objective.name} computes its advantages from {', '.join(read)}; this pipeline has one reward a "
            "completion: take another algorithm, or kl in place of reward_kl"
        )
    missing = [name for name in objective.required_batch_fields if name not in HERE]
    if missing:
        raise ValueError(f"{objective.name} reads {', '.join(missing)}, which this pipeline does not have")
