"""Options of the terms that every objective can have: KL penalty, entropy bonus, correction, aggregation."""

from dataclasses import dataclass, fields
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
    """A penalty in the loss for leaving the reference."""

    coef: float | None = None
    """β. 0 takes the penalty away."""
    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] | None = None
    """Of the KL per token; with + it has the gradient of k2."""

    def component(self, kl: components.KL | None) -> components.KL | None:
        """The term in place of the recipe's ``kl``."""
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
    made = {
        name: options.component(getattr(objective, name))  # type: ignore[attr-defined]
        for name, options in terms.items()
        if options.given()
    }
    return objective.replace(**made) if made else objective
