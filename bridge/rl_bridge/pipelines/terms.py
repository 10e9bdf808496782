"""Options of the terms that every objective can have: KL penalty, entropy bonus, correction, aggregation."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import rl_fn
from rl_fn import components

Level = Literal["token", "sequence"]


class TermOptions:
    """Options of one term. What is None is the recipe's."""

    def given(self) -> dict[str, Any]:
        """The options that were given."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class KLOptions(TermOptions):
    """A penalty for leaving the reference."""

    coef: float | None = None
    """β. 0 takes the penalty away."""
    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] | None = None
    """Of the KL per token; with + it has the gradient of k2. In the reward k1 is the default."""
    place: Literal["loss", "reward"] | None = None
    """The penalty is a term of the loss, or taken off the reward token by token (of π_old). None is the recipe's."""

    def given(self) -> dict[str, Any]:
        """The options of the penalty itself."""
        return {name: value for name, value in super().given().items() if name != "place"}

    def replaced(self, objective: rl_fn.Objective) -> rl_fn.Objective:
        """The objective with its penalty where it belongs."""
        place = self.place or ("reward" if objective.reward_kl is not None else "loss")
        own = objective.kl if objective.reward_kl is None else objective.reward_kl
        if place == "loss":
            return objective.replace(kl=self.component(own), reward_kl=None)
        before = components.KL("k1", 0.0) if own is None else own
        return objective.replace(kl=None, reward_kl=replace(before, **self.given()))

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
        """The weights, times the recipe's own ``correction`` (M2PO's mask); their defaults for what is not given."""
        kinds = {"tis": (components.TIS, {"cap", "level"}), "icepop": (components.IcePop, {"low", "high", "level"})}
        constants = {name: value for name, value in self.given().items() if name != "kind"}
        kind, takes = kinds.get(self.kind or "none", (None, set()))
        if not constants.keys() <= takes:
            given = ", ".join(sorted(constants.keys() - takes))
            raise ValueError(f"--objective.correction.kind {self.kind} does not take {given}")
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
        kept = {"mode": aggregation.mode, "max_completion_length": length}
        return components.Aggregation(**{**kept, **self.given()})


def with_terms(objective: rl_fn.Objective, terms: dict[str, TermOptions]) -> rl_fn.Objective:
    """The objective with each of the ``terms`` of which something is given in place of its own."""
    for name, options in terms.items():
        if options == type(options)():
            continue
        if isinstance(options, KLOptions):
            objective = options.replaced(objective)
        else:
            objective = objective.replace(**{name: options.component(getattr(objective, name))})  # type: ignore[attr-defined]
    return objective
