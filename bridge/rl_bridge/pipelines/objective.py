"""An ``rl_fn`` recipe from a config: by name, with every hyper-parameter that some recipe has."""

from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Literal

import rl_fn
from rl_fn import components

TERMS = ("kl_coef", "kl_estimator", "reward_kl_coef", "entropy_coef", "correction_cap", "dual_clip", "value_clip")
RECIPES = {name: getattr(rl_fn.recipes, name) for name in rl_fn.recipes.__all__}

Algorithm = Literal[
    "cispo",
    "clip_cov",
    "dapo",
    "decoupled_ppo",
    "dppo",
    "dr_grpo",
    "dro",
    "gdpo",
    "gigpo",
    "gmpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "gspo",
    "gspo_token",
    "kimi",
    "kl_cov",
    "luspo",
    "m2po",
    "maxrl",
    "on_policy_distillation",
    "opo",
    "passk",
    "ppo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "sapo",
    "topr",
    "vapo",
    "vespo",
]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """An ``rl_fn`` recipe by name; what is None keeps the paper's value. docs/objectives.md has the equations."""

    algorithm: Algorithm = "dapo"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    kl_coef: float | None = None
    kl_estimator: str | None = None
    reward_kl_coef: float | None = None
    entropy_coef: float | None = None
    correction_cap: float | None = None
    """Cap of truncated importance weights against the rollout's log-probabilities."""
    eps: float | None = None
    scale: str | None = None
    divide_by_std: bool | None = None
    baseline: float | None = None
    max_completion_length: float | None = None
    """Dr. GRPO's generation budget in tokens."""
    gamma: float | None = None
    lam: float | None = None
    lam_alpha: float | None = None
    critic_lam: float | None = None
    whiten: bool | None = None
    value_clip: float | None = None
    positive_coef: float | None = None
    norm: float | None = None
    alpha: str | None = None
    k: int | None = None
    weights: tuple[float, ...] | None = None
    weight: float | None = None
    behaviour: str | None = None
    level: str | None = None
    weight_cap: float | None = None
    ratio_cap: float | None = None
    threshold: float | None = None
    divergence: str | None = None
    tau_pos: float | None = None
    tau_neg: float | None = None
    k_pos: float | None = None
    lambda_pos: float | None = None
    k_neg: float | None = None
    lambda_neg: float | None = None
    fraction: float | None = None
    cov_low: float | None = None
    cov_high: float | None = None
    coef: float | None = None
    beta: float | None = None
    tau: float | None = None
    clip: float | None = None

    def build(self) -> rl_fn.Objective:
        """The objective."""
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "algorithm"}
        given = {name: value for name, value in options.items() if value is not None}
        recipe = RECIPES[self.algorithm]
        terms = {name: given.pop(name) for name in TERMS if name in given and name not in signature(recipe).parameters}
        try:
            objective = recipe(**given)
        except TypeError as error:
            raise ValueError(f"{self.algorithm} does not take these options: {error}") from error
        estimator = terms.get("kl_estimator", "k3" if objective.kl is None else objective.kl.estimator)
        if terms.get("kl_coef"):
            objective = objective.replace(kl=components.KL(estimator, terms["kl_coef"]))
        elif "kl_estimator" in terms and objective.kl is not None:
            objective = objective.replace(kl=components.KL(estimator, objective.kl.coef))
        if terms.get("reward_kl_coef"):
            objective = objective.replace(reward_kl=components.KL("k1", terms["reward_kl_coef"]))
        if terms.get("entropy_coef"):
            objective = objective.replace(entropy=components.EntropyBonus(terms["entropy_coef"]))
        if "correction_cap" in terms:
            weights = components.TIS(terms["correction_cap"])
            own = objective.correction
            objective = objective.replace(correction=weights if own is None else components.Product((own, weights)))
        if "dual_clip" in terms:
            try:
                objective = objective.replace(loss=replace(objective.loss, dual_clip=terms["dual_clip"]))
            except TypeError as error:
                raise ValueError(f"{self.algorithm} does not take these options: {error}") from error
        if "value_clip" in terms:
            objective = objective.replace(value=components.ValueLoss(terms["value_clip"]))
        return objective


def require_rewards_alone(objective: rl_fn.Objective) -> None:
    """Refuse an objective that reads more than one reward per answer and the policies' log-probabilities."""
    shape, fields = objective.advantage.rewards_shape, objective.required_rollout_fields
    if fields != ("rewards",) or shape != "*batch G":
        read = ", ".join(f"{name} {shape}" if name == "rewards" else name for name in fields)
        raise ValueError(
            f"{objective.name} computes its advantages from {read}; this job has one reward per answer: take another "
            "algorithm, or kl_coef in place of reward_kl_coef"
        )
    known = ("rollout_logprobs", "ref_logprobs", "entropies")
    missing = [name for name in objective.required_batch_fields if name not in known]
    if missing:
        raise ValueError(f"{objective.name} reads {', '.join(missing)}, which this job does not have")
