"""OpenRLHF 0.11.2: PolicyLoss, the actor's training step and the experience maker."""

import math
from collections.abc import Mapping
from typing import Any

from rl_fn._numerics import require
from rl_fn.objectives.components import Aggregation, EntropyBonus
from rl_fn.objectives.dialects import dialect_advantages as advantages
from rl_fn.objectives.dialects.dialect_losses import ImportanceBand, RatioClip
from rl_fn.objectives.dialects.dialect_terms import BoundedKL
from rl_fn.objectives.dialects.options import one_of, read
from rl_fn.objectives.objective import Objective

DEFAULTS: dict[str, Any] = {
    "actor.eps_clip": 0.2,
    "actor.eps_clip_low_high": None,
    "actor.dual_clip": None,
    "actor.policy_loss_type": "ppo",
    "actor.loss_agg_mode": "token-mean",
    "actor.entropy_coef": None,
    "algo.advantage.estimator": "gae",
    "algo.advantage.gamma": 1.0,
    "algo.advantage.lambd": 1.0,
    "algo.advantage.no_std_norm": False,
    "algo.advantage.is_correction_level": "off",
    "algo.advantage.is_correction_mode": "mask",
    "algo.advantage.is_correction_gating": "ratio",
    "algo.advantage.is_correction_threshold": (0.5, 5.0),
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "algo.kl.use_loss": False,
    "algo.kl.unbiased_gradient": False,
    "reward.clip_range": (-10.0, 10.0),
}


def _correction(o: dict[str, Any]) -> ImportanceBand | None:
    level, mode, gate = (o[f"algo.advantage.is_correction_{name}"] for name in ("level", "mode", "gating"))
    one_of("openrlhf", "is_correction_level", level, ("off", "token", "seq"))
    one_of("openrlhf", "is_correction_mode", mode, ("mask", "clip"))
    one_of("openrlhf", "is_correction_gating", gate, ("ratio", "binary_kl", "tv"))
    if level == "off" or o["actor.policy_loss_type"] == "gspo":
        return None
    low, high = advantages.bounds(o["algo.advantage.is_correction_threshold"])
    tokens = mode == "mask" or (level == "token" and gate == "ratio")
    require(tokens, "openrlhf: is_correction_mode=clip requires is_correction_level=token and gating=ratio")
    require(gate == "ratio" or low == 0, f"openrlhf: is_correction_gating={gate} takes an upper bound only")
    at = "token" if level == "token" else "sequence"
    return ImportanceBand(low, high, mode, at, gate, keep_tokens=mode == "mask")


def openrlhf(config: Mapping[str, Any]) -> Objective:
    """Return what OpenRLHF computes for options of its command line.

    A KL loss and an entropy bonus are always averaged over tokens, also where the policy loss is averaged over
    sequences. The default puts β · k1 into the rewards. group_norm adds 1e-9 to the std, so float32 rounding in a group
    of equal rewards becomes advantages of about ±1 there; here they are 0.

    Args:
        config: options under OpenRLHF's names without the leading dashes, nested or joined by dots.

    Returns:
        Objective; with the estimator "gae" its advantages come from a critic.

    Raises:
        ValueError: for an unknown option or value, or a combination that OpenRLHF refuses.

    Reference:
        OpenRLHF 0.11.2, openrlhf/models/loss.py and openrlhf/trainer/ppo_utils/experience_maker.py (docs/dialects.md).

    >>> from rl_fn import dialects
    >>> print(dialects.openrlhf({"actor.policy_loss_type": "gspo", "algo.kl.init_coef": 0.0}).explain())
    openrlhf gspo: minimise seq-mean-token-mean of ℓ
      ℓ = −min(ρA, clip(ρ, 1 − 0.2, 1 + 0.2)A), ρ per sequence to the old policy
      A = Σ (1·1)ˡ δₜ₊ₗ, δ = r + 1·V′ − V, whitened
      ρ = exp(logprobs − old_logprobs)

    """
    o = read("openrlhf", config, DEFAULTS)
    kind = one_of("openrlhf", "actor.policy_loss_type", o["actor.policy_loss_type"], ("ppo", "gspo"))
    mode = one_of("openrlhf", "loss_agg_mode", o["actor.loss_agg_mode"], ("token-mean", "seq-mean-token-mean"))
    estimator = one_of("openrlhf", "estimator", o["algo.advantage.estimator"], ("gae", *advantages.OPENRLHF))
    low, high = o["actor.eps_clip_low_high"] or (o["actor.eps_clip"], o["actor.eps_clip"])
    dual = None if o["actor.dual_clip"] is None else float(o["actor.dual_clip"])
    if kind == "gspo":
        behaviour = "old" if o["algo.advantage.is_correction_level"] == "off" else "rollout"
        loss = RatioClip(float(low), float(high), dual, level="sequence", behaviour=behaviour)
        mode = "seq-mean-token-mean"
    else:
        loss = RatioClip(float(low), float(high), dual, limit=20.0)
    coef = max(float(o["algo.kl.init_coef"]), 0.0)
    name = one_of("openrlhf", "algo.kl.estimator", o["algo.kl.estimator"], ("k1", "k2", "k3"))
    gradient = "weighted k2" if o["algo.kl.unbiased_gradient"] and o["algo.kl.use_loss"] else "own"
    kl = None
    if coef:
        kl = BoundedKL(name, coef, low=-10.0 if name == "k3" else -math.inf, bound=10.0, gradient=gradient)
    gamma, by_std = float(o["algo.advantage.gamma"]), not o["algo.advantage.no_std_norm"]
    lam = float(o["algo.advantage.lambd"])
    clip_low, clip_high = o["reward.clip_range"]
    outcome = advantages.OpenRLHFAdvantage(estimator, gamma, by_std, (float(clip_low), float(clip_high)))
    critic = advantages.BiasedGAE(gamma, lam, carry=False, divide_by_std=by_std)
    apart = None if mode == "token-mean" else Aggregation("token-mean")
    entropy = float(o["actor.entropy_coef"] or 0.0)
    return Objective(
        name=f"openrlhf {kind}",
        advantage=critic if estimator == "gae" else outcome,
        loss=loss,
        aggregation=Aggregation(mode),
        kl=kl if o["algo.kl.use_loss"] else None,
        correction=_correction(o),
        entropy=EntropyBonus(entropy) if entropy else None,
        kl_aggregation=apart if kl is not None and o["algo.kl.use_loss"] else None,
        entropy_aggregation=apart if entropy else None,
        reward_kl=None if o["algo.kl.use_loss"] else kl,
        strict=False,
    )
