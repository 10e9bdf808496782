"""Options of the controllers that set a coefficient from step to step: of the KL penalty, of the entropy bonus."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import rl_fn
from rl_bridge.messages import given
from rl_bridge.trainers.policy_inputs.controlled import Coefficients, Controlled, constraint
from rl_fn import Objective, components

Kind = Literal["fixed", "linear", "exponential", "pid", "scheduled", "adaptive", "constraint"]


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """A controller of ``rl_fn.control`` and its constants. It begins at the coefficient of its term."""

    kind: Kind | None = None
    """linear (Ziegler's), exponential, pid: hold a KL at target. adaptive: hold an entropy at target. constraint: a
    Lagrange multiplier keeps a KL below target, an entropy above. scheduled: from the start to end."""
    target: float | None = None
    """In nats a token."""
    low: float | None = None
    high: float | None = None
    """Bounds of the coefficient."""
    horizon: float | None = None
    clip: float | None = None
    """Of linear: completions until a clipped error has changed the coefficient by its size; the bound of the error."""
    up: float | None = None
    down: float | None = None
    """Of exponential: factors for too much and too little."""
    kp: float | None = None
    ki: float | None = None
    kd: float | None = None
    """Gains of pid."""
    step: float | None = None
    """Of adaptive: how much the coefficient changes."""
    lr: float | None = None
    penalty: float | None = None
    """Of constraint: step of the multiplier; weight of the quadratic penalty."""
    schedule: Literal["cosine", "linear", "exponential", "warmup_cosine"] | None = None
    end: float | None = None
    steps: int | None = None
    warmup: int | None = None
    """Of scheduled: its form, its last value, its steps, those of the warm-up."""

    def controller(self, term: Literal["KL", "entropy"], coef: Any, samples: int) -> rl_fn.Controller:
        """The controller of a term that begins at ``coef``; ``samples`` completions are one step.

        Raises:
            ValueError: the kind is not one for this term, an option that the kind does not take, or lacks.
        """
        make, takes = self._function(term, samples)
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "kind"}
        given = {name: value for name, value in given.items() if value is not None}
        if other := given.keys() - takes.keys():
            raise ValueError(f"{term} control of kind {self.kind} does not take {', '.join(sorted(other))}")
        constants = {takes[name]: value for name, value in given.items()}
        if coef and "coef" in takes:
            constants[takes["coef"]] = float(coef)
        try:
            inspect.signature(make).bind(**constants)
        except TypeError as error:
            raise ValueError(f"{term} control of kind {self.kind}: {error}") from error
        return make(**constants)

    def _function(self, term: str, samples: int) -> tuple[Callable[..., rl_fn.Controller], dict[str, str]]:
        """A function, and which of the options it takes under which name."""
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
        taken = {"coef", *(f.name for f in fields(self))} & inspect.signature(function).parameters.keys()
        return function, {name: name for name in taken - {"kind", "start", "samples"}} | names


def controlled(
    objective: Objective, kl: ControlOptions, entropy: ControlOptions, samples: int
) -> tuple[Objective, Coefficients]:
    """The objective with the terms that are controlled, and their controllers.

    A KL penalty that the objective does not have is k3, in the loss. A term's coefficient is where its controller
    begins; 0 leaves that to the controller.

    Raises:
        ValueError: see ``ControlOptions.controller``.
    """
    for name, options in (("KL", kl), ("entropy", entropy)):
        if options.kind is None and options != (default := ControlOptions()):
            changed = given(options, *(n for n, value in vars(options).items() if value != getattr(default, n)))
            raise ValueError(f"{name} control has options and no kind: {changed}")
    terms: dict[str, Controlled] = {}
    if kl.kind is not None:
        if objective.kl is None and objective.reward_kl is None:
            objective = objective.replace(kl=components.KL("k3", 0.0))
        slot = "kl" if objective.kl is not None else "reward_kl"
        terms[slot] = Controlled(kl.controller("KL", getattr(objective, slot).coef, samples), slot)
    if entropy.kind is not None:
        objective = objective.replace(entropy=objective.entropy or components.EntropyBonus(0.0))
        assert objective.entropy is not None
        terms["entropy"] = Controlled(entropy.controller("entropy", objective.entropy.coef, samples), "entropy")
    return objective, Coefficients(terms)
