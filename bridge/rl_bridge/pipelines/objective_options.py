"""Options of an objective: a class an algorithm, terms that all algorithms share, controllers of coefficients."""

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import tyro

import rl_fn
from rl_bridge.algorithms.policy_setup import constraint
from rl_bridge.common.argument_kinds import check_options
from rl_bridge.common.terminal import given
from rl_bridge.modules.own_loss import load_loss
from rl_fn import Controller, Objective, components

Level = Literal["token", "sequence"]


class TermOptions:
    """Options of one term. None stands for the recipe's value."""

    def __post_init__(self) -> None:
        """Refuse a choice that there is not, and numbers that are none."""
        check_options(self)

    def given(self) -> dict[str, Any]:
        """Name → value of the options that are not None."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class KLOptions(TermOptions):
    """A penalty for leaving the reference."""

    coef: float | None = None
    """β. 0 takes the penalty away."""
    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] | None = None
    """Estimator of the KL per token; with + it has the gradient of k2. In the reward k1 is the default."""
    place: Literal["loss", "reward"] | None = None
    """The penalty is a term of the loss, or taken off the reward token by token (of π_old). None is the recipe's."""

    def given(self) -> dict[str, Any]:
        """The options of the penalty itself."""
        return {name: value for name, value in super().given().items() if name != "place"}

    def replaced(self, objective: rl_fn.Objective, *, controlled: bool = False) -> rl_fn.Objective:
        """The objective with its penalty in the loss or in the reward; ``controlled``: a controller sets its size.

        Raises:
            ValueError: there is no penalty, and neither a coefficient nor a controller makes one.
        """
        place = self.place or ("reward" if objective.reward_kl is not None else "loss")
        own = objective.kl if objective.reward_kl is None else objective.reward_kl
        if place == "loss":
            return objective.replace(kl=self.component(own), reward_kl=None)
        if own is None and self.coef is None and not controlled:
            raise ValueError(
                "the objective has no KL penalty to take off the reward: give --objective.kl.coef with --objective.kl."
                "place reward, or a controller of it, --kl-control.kind"
            )
        penalty = replace(components.KL("k1", 0.0) if own is None else own, **self.given())
        return objective.replace(kl=None, reward_kl=penalty if penalty.coef or controlled else None)

    def component(self, kl: components.KL | None) -> components.KL | None:
        """The term of the loss in place of the recipe's ``kl``."""
        if kl is None and self.coef is None:
            raise ValueError("the objective has no KL penalty: give --objective.kl.coef with the estimator")
        term = components.KL(**{**({} if kl is None else {"estimator": kl.estimator, "coef": kl.coef}), **self.given()})
        return term if term.coef else None


@dataclass(frozen=True, kw_only=True)
class EntropyOptions(TermOptions):
    """A bonus for entropy."""

    coef: float | None = None
    """0 takes the bonus away."""

    def component(self, _: Any) -> components.EntropyBonus | None:
        """The term in place of the recipe's."""
        return components.EntropyBonus(self.coef) if self.coef else None


@dataclass(frozen=True, kw_only=True)
class CorrectionOptions(TermOptions):
    """Importance weights π_old/μ against the log-probabilities that the rollout kept."""

    kind: Literal["none", "tis", "icepop"] | None = None
    """tis: truncated at cap. icepop: 0 outside of [low, high]. none takes the recipe's away."""
    cap: float | None = None
    low: float | None = None
    high: float | None = None
    level: Level | None = None
    """A weight for each token, or for each completion."""

    def component(self, correction: Any) -> Any:
        """The weights, times the recipe's own ``correction`` (M2PO's mask)."""
        kinds = {"tis": (components.TIS, {"cap", "level"}), "icepop": (components.IcePop, {"low", "high", "level"})}
        constants = {name: value for name, value in self.given().items() if name != "kind"}
        kind, takes = kinds.get(self.kind or "none", (None, set()))
        if not constants.keys() <= takes:
            others = ", ".join(sorted(constants.keys() - takes))
            raise ValueError(f"--objective.correction.kind {self.kind} does not take {others}")
        if kind is None or correction is None:
            return None if kind is None else kind(**constants)
        return components.Product((correction, kind(**constants)))


@dataclass(frozen=True, kw_only=True)
class AggregationOptions(TermOptions):
    """How the losses of tokens become one number."""

    mode: str | None = None
    """One of rl_fn.aggregate's modes."""
    max_completion_length: float | None = None
    """Tokens that seq-mean-token-sum-norm divides by."""

    def component(self, aggregation: components.Aggregation) -> components.Aggregation:
        """The term in place of the recipe's."""
        length = None if self.mode else aggregation.max_completion_length
        constants = {"mode": aggregation.mode, "max_completion_length": length}
        return components.Aggregation(**{**constants, **self.given()})


def with_terms(
    objective: rl_fn.Objective, terms: dict[str, TermOptions], *, controlled: bool = False
) -> rl_fn.Objective:
    """The objective with each of the ``terms`` that has an option in place of the objective's own.

    ``controlled``: a controller has the coefficient of the KL.
    """
    for name, options in terms.items():
        if options == type(options)():
            continue
        if isinstance(options, KLOptions):
            objective = options.replaced(objective, controlled=controlled)
        else:
            objective = objective.replace(**{name: options.component(getattr(objective, name))})  # type: ignore[attr-defined]
    return objective


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """Options that every algorithm takes. A subclass has the constants of one recipe besides."""

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
    loss: str | None = None
    """``FILE.py:name``: a function of a batch → the loss of each token, in place of the recipe's. Plain functions are
    JAX's; ``rl_bridge.torch_loss`` wraps one of PyTorch."""
    algorithm: str = field(default="", init=False)

    def build(self, *, controlled: bool = False) -> rl_fn.Objective:
        """The recipe with these constants and terms; ``controlled``: a controller has the coefficient of the KL."""
        shared = {option.name for option in fields(ObjectiveOptions)}
        constants = {option.name: getattr(self, option.name) for option in fields(self) if option.name not in shared}
        terms = {name: getattr(self, name) for name in ("kl", "entropy", "correction", "aggregation")}
        try:
            objective = with_terms(getattr(rl_fn.recipes, self.algorithm)(**constants), terms, controlled=controlled)
        except ValueError as error:
            # A constant may have another name in the part of the objective that refuses its value.
            defaults = {option.name: option.default for option in fields(self)}
            if changed := [name for name, value in constants.items() if value != defaults[name]]:
                raise ValueError(f"{error} ({self.algorithm} with {given(self, *changed)})") from error
            raise
        clip = constants.get("clip_low") or 0.0
        losses = getattr(objective.loss, "parts", (objective.loss,))
        if clip > 1 and any("1 − {clip_low}" in loss.equation for loss in losses):
            raise ValueError(
                f"--objective.clip-low must be at most 1, got {clip:g}: no ratio of probabilities is below 0, so that "
                "1 clips none from below already"
            )
        if self.dynamic_sampling is not None:
            sampling = objective.dynamic_sampling or components.DynamicSampling()
            objective = objective.replace(dynamic_sampling=sampling if self.dynamic_sampling else None)
        if self.loss is not None:
            objective = self._with_own_loss(objective, constants)
        if self.dual_clip is not None:
            if "dual_clip" not in {constant.name for constant in fields(objective.loss)}:
                raise ValueError(f"the loss of {self.algorithm} has no dual_clip: {objective.loss}")
            objective = objective.replace(loss=replace(objective.loss, dual_clip=self.dual_clip))
        if self.value_clip is not None:
            if objective.value is None:
                raise ValueError(f"{self.algorithm} has no critic: value_clip is for ppo and vapo")
            objective = objective.replace(value=replace(objective.value, clip=self.value_clip))
        return objective

    def _with_own_loss(self, objective: rl_fn.Objective, constants: dict[str, Any]) -> rl_fn.Objective:
        """The objective with the loss of the user's file.

        Raises:
            ValueError: a constant of the loss that it takes the place of.
        """
        loss, recipe = load_loss(str(self.loss)), getattr(rl_fn.recipes, self.algorithm)
        defaults = {option.name: option.default for option in fields(self)}
        for name, value in constants.items():
            if value != defaults[name]:
                others = {**constants, name: defaults[name]}
                if recipe(**others).replace(loss=loss) == recipe(**constants).replace(loss=loss):
                    flag = f"--objective.{name.replace('_', '-')}"
                    raise ValueError(f"{flag} is of the loss of {self.algorithm}, and --objective.loss takes its place")
        return objective.replace(loss=loss)


def _option_type(annotation: Any) -> Any:
    """The type of an option on the command line, where no array can be written."""
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
# Unpickling looks up a class by its name in this module.
globals().update({options.__name__: options for options in ALGORITHMS.values()})


def objective_options(algorithm: str, **options: Any) -> ObjectiveOptions:
    """The options of an algorithm by its name.

    >>> objective_options("gspo", clip_high=0.001, kl=KLOptions(coef=0.01)).build().kl
    KL(estimator='k3', coef=0.01)
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}; there is: {', '.join(sorted(ALGORITHMS))}")
    return ALGORITHMS[algorithm](**options)


def subcommands(options: Mapping[str, type]) -> Any:
    """The type of an option with a sub-command for each of the classes by its name, as objective:gspo."""
    return Union[  # noqa: UP007
        tuple(
            Annotated[kind, tyro.conf.subcommand(name, description=(kind.__doc__ or "").partition("\n")[0])]
            for name, kind in options.items()
        )
    ]


if TYPE_CHECKING:
    Algorithm = ObjectiveOptions
else:
    Algorithm = subcommands(ALGORITHMS)

# Controllers of coefficients.

Kind = Literal["fixed", "linear", "exponential", "pid", "scheduled", "adaptive", "constraint"]


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """A controller of ``rl_fn.control`` and its constants. A controller begins at the coefficient of its term."""

    kind: Kind | None = None
    """linear (Ziegler's), exponential, pid: hold a KL at target. adaptive: hold an entropy at target. constraint: a
    Lagrange multiplier keeps a KL below target, an entropy above. scheduled: from the start to end."""
    target: float | None = None
    """Target of the KL or of the entropy, in nats a token."""
    low: float | None = None
    """Lower bound of the coefficient."""
    high: float | None = None
    """Upper bound of the coefficient."""
    horizon: float | None = None
    """linear: completions until a clipped error has changed the coefficient by its size."""
    clip: float | None = None
    """linear: bound of the error."""
    up: float | None = None
    """exponential: factor for a KL above target."""
    down: float | None = None
    """exponential: factor for a KL below target."""
    kp: float | None = None
    """pid: gain of the error."""
    ki: float | None = None
    """pid: gain of the error's sum."""
    kd: float | None = None
    """pid: gain of the error's change."""
    step: float | None = None
    """adaptive: change of the coefficient."""
    lr: float | None = None
    """constraint: step of the multiplier."""
    penalty: float | None = None
    """constraint: weight of the quadratic penalty."""
    schedule: Literal["cosine", "linear", "exponential", "warmup_cosine"] | None = None
    """scheduled: form of the curve."""
    end: float | None = None
    """scheduled: last value."""
    steps: int | None = None
    """scheduled: steps from the first value to the last, of those that update the policy."""
    warmup: int | None = None
    """scheduled: steps of the warm-up, counted likewise."""

    def __post_init__(self) -> None:
        """Refuse a choice that there is not, and numbers that are none."""
        check_options(self)

    def controller(self, term: Literal["KL", "entropy"], coef: Any, samples: int) -> rl_fn.Controller:
        """The controller of a term that begins at ``coef``; ``samples`` completions are one step.

        Raises:
            ValueError: the kind is not one for this term, an option that the kind does not take, or lacks.
        """
        make, takes = self._function(term, samples)
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "kind"}
        values = {name: value for name, value in values.items() if value is not None}
        if other := values.keys() - takes.keys():
            raise ValueError(f"{term} control of kind {self.kind} does not take {', '.join(sorted(other))}")
        constants = {takes[name]: value for name, value in values.items()}
        if coef and "coef" in takes:
            constants[takes["coef"]] = float(coef)
        needed = {name for name, p in inspect.signature(make).parameters.items() if p.default is p.empty}
        if lacking := [option for option, name in takes.items() if name in needed - constants.keys()]:
            part = term.lower()
            names = {option: f"--{part}-control.{option}" for option in lacking} | {"coef": f"--objective.{part}.coef"}
            raise ValueError(
                f"{term} control of kind {self.kind} needs {', '.join(names[option] for option in sorted(lacking))}"
            )
        return make(**constants)

    def _function(self, term: str, samples: int) -> tuple[Callable[..., rl_fn.Controller], dict[str, str]]:
        """The function of the kind, and option → parameter of that function."""
        both = {
            "scheduled": (rl_fn.scheduled_kl, {"schedule": "kind", "coef": "start"}),
            "constraint": (
                partial(constraint, direction="<=" if term == "KL" else ">="),
                {"target": "limit", "coef": "start", "lr": "lr", "penalty": "penalty", "high": "high"},
            ),
        }
        of_kl = {
            "fixed": (rl_fn.fixed_kl, {}),
            "linear": (partial(rl_fn.linear_kl, samples=samples), {}),
            "exponential": (rl_fn.exponential_kl, {}),
            "pid": (rl_fn.pid_kl, {}),
        }
        kinds: dict[str, Any] = both | (of_kl if term == "KL" else {"adaptive": (rl_fn.adaptive_entropy, {})})
        if self.kind not in kinds:
            raise ValueError(f"{term} control of kind {self.kind}: there are {', '.join(sorted(kinds))}")
        function, names = kinds[self.kind]
        options = {"coef", *(f.name for f in fields(self))} & inspect.signature(function).parameters.keys()
        return function, {name: name for name in options - {"kind", "start", "samples"}} | names


def controlled(
    objective: Objective, kl: ControlOptions, entropy: ControlOptions, samples: int
) -> tuple[Objective, dict[str, Controller]]:
    """The objective with the controlled terms, and their controllers by term.

    An objective without a KL penalty gets k3, in the loss. A controller begins at its term's coefficient; with a
    coefficient of 0, at the controller's own start.

    Raises:
        ValueError: see ``ControlOptions.controller``.
    """
    for name, options in (("KL", kl), ("entropy", entropy)):
        if options.kind is None and options != (default := ControlOptions()):
            changed = given(options, *(n for n, value in vars(options).items() if value != getattr(default, n)))
            raise ValueError(f"{name} control has options and no kind: {changed}")
    terms: dict[str, Controller] = {}
    if kl.kind is not None:
        if objective.kl is None and objective.reward_kl is None:
            objective = objective.replace(kl=components.KL("k3", 0.0))
        slot = "kl" if objective.kl is not None else "reward_kl"
        terms[slot] = kl.controller("KL", getattr(objective, slot).coef, samples)
    if entropy.kind is not None:
        objective = objective.replace(entropy=objective.entropy or components.EntropyBonus(0.0))
        assert objective.entropy is not None
        terms["entropy"] = entropy.controller("entropy", objective.entropy.coef, samples)
    return objective, terms
