"""verl 0.9.1: core_algos and the actor's loss."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from rl_fn._numerics import Array, require
from rl_fn.objectives.batch import Batch
from rl_fn.objectives.components import GAE, KL, Aggregation, EntropyBonus, Reinforce
from rl_fn.objectives.dialects import dialect_advantages as advantages
from rl_fn.objectives.dialects.dialect_losses import ImportanceBand, RatioClip, TokenLoss, trusted_reinforce
from rl_fn.objectives.dialects.dialect_terms import AllRows, BoundedKL, OverWidth
from rl_fn.objectives.dialects.options import one_of, read
from rl_fn.objectives.objective import Objective
from rl_fn.policy_losses import regularised as regularised_losses
from rl_fn.policy_losses import sequence_level as sequence_losses
from rl_fn.policy_losses import token_level as token_losses

DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.rollout_correction.rollout_is": None,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "actor.policy_loss.loss_mode": "vanilla",
    "actor.policy_loss.dro_beta": None,
    "actor.clip_ratio": 0.2,
    "actor.clip_ratio_low": 0.2,
    "actor.clip_ratio_high": 0.2,
    "actor.clip_ratio_c": 3.0,
    "actor.tau_pos": 1.0,
    "actor.tau_neg": 1.05,
    "actor.loss_agg_mode": "token-mean",
    "actor.loss_scale_factor": None,
    "actor.use_kl_loss": False,
    "actor.kl_loss_coef": 0.001,
    "actor.kl_loss_type": "low_var_kl",
    "actor.entropy_coeff": 0.0,
}
LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "geo_mean", "dro", "cispo")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KLS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
LIMIT = 20.0


def kl_penalty(name: str, coef: float, option: str = "kl_penalty") -> KL:
    """Return verl's kl_penalty: k3 of a d inside ±20, at most 10; a name that ends in + has k2's gradient."""
    plain = one_of("verl", option, name, [*KLS, *(f"{kl}+" for kl in KLS)]).removesuffix("+")
    estimator = KLS[plain]
    straight = "k2" if name.endswith("+") and estimator != "k2" else "own"
    if estimator == "k3":
        return BoundedKL("k3", coef, low=-LIMIT, high=LIMIT, bound=10.0, gradient=straight)
    return BoundedKL(estimator, coef, gradient=straight)


def _loss(o: dict[str, Any]) -> Callable[[Batch], jax.Array]:
    def either(name: str) -> float:
        return float(o[name if o[name] is not None else "actor.clip_ratio"])

    mode = one_of("verl", "actor.policy_loss.loss_mode", o["actor.policy_loss.loss_mode"], LOSSES)
    low, high = either("actor.clip_ratio_low"), either("actor.clip_ratio_high")
    dual = float(o["actor.clip_ratio_c"])
    if mode in ("dppo_tv", "dppo_kl"):
        bounds = (("low", low), ("high", high), ("ratio_cap", dual), ("divergence", mode.removeprefix("dppo_")))
        return TokenLoss(trusted_reinforce, bounds)
    if mode == "gspo":
        return RatioClip(low, high, level="sequence-token", cap=10.0)
    if mode == "sapo":
        taus = (("tau_pos", float(o["actor.tau_pos"])), ("tau_neg", float(o["actor.tau_neg"])))
        return TokenLoss(token_losses.sapo, taus, limit=LIMIT)
    if mode == "gpg":
        return Reinforce()
    if mode == "geo_mean":
        return TokenLoss(sequence_losses.gmpo, (("clip_low", low), ("clip_high", high)))
    if mode == "dro":
        beta = o["actor.policy_loss.dro_beta"]
        if beta is None or beta <= 0:
            raise ValueError(f"verl: dro needs a positive actor.policy_loss.dro_beta, got {beta}")
        return TokenLoss(regularised_losses.dro, (("beta", float(beta)),))
    if mode == "cispo":
        return TokenLoss(token_losses.cispo, (("clip_low", low), ("clip_high", high)))
    return RatioClip(low, high, dual, limit=LIMIT)


def _aggregation(o: dict[str, Any]) -> Aggregation:
    mode = one_of("verl", "actor.loss_agg_mode", o["actor.loss_agg_mode"], AGGREGATIONS)
    factor = o["actor.loss_scale_factor"]
    if mode == "seq-mean-token-sum-norm":
        return OverWidth() if factor is None else Aggregation(mode, float(factor))
    return Aggregation(mode)


def _correction(o: dict[str, Any], mode: str) -> Callable[[Batch], Array] | None:
    level = o["algorithm.rollout_correction.rollout_is"]
    if level is None:
        return None
    one_of("verl", "algorithm.rollout_correction.rollout_is", level, ("token", "sequence"))
    require(mode != "geo_mean", "verl: rollout_is with geo_mean (a geometric mean of the weights) is not covered")
    threshold = o["algorithm.rollout_correction.rollout_is_threshold"]
    level = "token" if level == "token" else "sequence_sum"
    low, _, high = str(threshold).rpartition("_")
    if low:
        return ImportanceBand(float(low), float(high), "mask", level, limit=LIMIT)
    return ImportanceBand(0.0, float(high), "clip", level, limit=LIMIT)


def verl(config: Mapping[str, Any]) -> Objective:
    """Return what verl computes for options of its trainer's configuration.

    log ρ is held at ±20, k3 at 10; the dual clip is on (3); a group of one keeps its raw reward; DPPO truncates
    ρ at the same 3. Names start at `algorithm` and `actor` (actor_rollout_ref.actor in the file).

    Args:
        config: options under verl's names, nested or joined by dots.

    Returns:
        Objective; with adv_estimator "gae" its advantages come from a critic.

    Raises:
        ValueError: for an unknown option or value, or a combination that is not covered.

    Reference:
        verl 0.9.1, verl/trainer/ppo/core_algos.py and verl/workers/utils/losses.py (docs/dialects.md).

    >>> from rl_fn import dialects
    >>> print(dialects.verl({"algorithm": {"adv_estimator": "grpo"}}).explain())
    verl vanilla: minimise token-mean of ℓ
      ℓ = −min(ρA, clip(ρ, 1 − 0.2, 1 + 0.2)A), at most −3A where A < 0, ρ per token to the old policy, log ρ in ±20
      A = verl's grpo
      ρ = exp(logprobs − old_logprobs)

    """
    o = read("verl", config, DEFAULTS)
    mode = o["actor.policy_loss.loss_mode"]
    gamma, lam = float(o["algorithm.gamma"]), float(o["algorithm.lam"])
    name = one_of("verl", "algorithm.adv_estimator", o["algorithm.adv_estimator"], ("gae", *advantages.VERL))
    loss, aggregation = _loss(o), _aggregation(o)
    policy = aggregation
    if mode == "sapo":
        policy = Aggregation("seq-mean-token-mean")
    if mode == "geo_mean":
        policy = AllRows("seq-mean-token-mean")
    apart = None if policy == aggregation else aggregation
    kl, entropy = float(o["actor.kl_loss_coef"]), float(o["actor.entropy_coeff"])
    in_reward = kl_penalty(o["algorithm.kl_penalty"], float(o["algorithm.kl_ctrl.kl_coef"]))
    scale = bool(o["algorithm.norm_adv_by_std_in_grpo"])
    return Objective(
        name=f"verl {mode}",
        advantage=GAE(gamma, lam) if name == "gae" else advantages.VerlAdvantage(name, scale, gamma),
        loss=loss,
        aggregation=policy,
        kl=kl_penalty(o["actor.kl_loss_type"], kl, "actor.kl_loss_type") if o["actor.use_kl_loss"] else None,
        correction=_correction(o, mode),
        entropy=EntropyBonus(entropy) if entropy else None,
        kl_aggregation=apart if o["actor.use_kl_loss"] else None,
        entropy_aggregation=apart if entropy else None,
        reward_kl=in_reward if o["algorithm.use_kl_in_reward"] else None,
        strict=False,
    )
