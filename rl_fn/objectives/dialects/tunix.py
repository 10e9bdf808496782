"""tunix 0.1.7: the GRPO family and PPO of tunix.rl."""

from collections.abc import Mapping
from typing import Any

from rl_fn.objectives.components import GAE, KL, Aggregation, EntropyBonus
from rl_fn.objectives.dialects.dialect_advantages import TunixGroup
from rl_fn.objectives.dialects.dialect_losses import ImportanceBand, RatioClip
from rl_fn.objectives.dialects.dialect_terms import BoundedKL, OverWidth
from rl_fn.objectives.dialects.options import one_of, read
from rl_fn.objectives.objective import Objective

SHARED: dict[str, Any] = {"policy_loss_fn": "grpo", "epsilon": 0.2, "epsilon_high": None, "epsilon_c": None}
GRPO: dict[str, Any] = {
    **SHARED,
    "advantage_estimator": "grpo",
    "loss_agg_mode": "sequence-mean-token-mean",
    "loss_algo": "grpo",
    "beta": 0.04,
    "kl_loss_mode": "kl",
    "kl_clamp_value": None,
    "sampler_is": None,
    "sampler_is_threshold": 2.0,
}
PPO: dict[str, Any] = {
    **SHARED,
    "epsilon_low": None,
    "gamma": 1.0,
    "gae_lambda": 0.95,
    "beta": 0.04,
    "kl_method": "low_var_kl",
    "kl_clamp_value": None,
    "entropy_coef": None,
}
KLS = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}
AGGREGATIONS = {
    "token-mean": Aggregation("token-mean"),
    "sequence-mean-token-mean": Aggregation("seq-mean-token-mean"),
    "sequence-mean-token-scale": OverWidth(),
    "seq-mean-token-sum": Aggregation("seq-mean-token-sum"),
    "sequence-mean-token-sum-norm": Aggregation("seq-mean-token-sum"),
}


def _kl(o: dict[str, Any], option: str) -> KL | None:
    estimator = KLS[one_of("tunix", option, o[option], KLS)]
    coef, bound = float(o["beta"] or 0.0), o["kl_clamp_value"]
    if not coef:
        return None
    return BoundedKL(estimator, coef) if bound is None else BoundedKL(estimator, coef, bound=float(bound))


def _or(value: Any, other: float) -> float:
    return float(value) if value else other


def _ppo(o: dict[str, Any]) -> Objective:
    epsilon = float(o["epsilon"])
    entropy = float(o["entropy_coef"] or 0.0)
    dual = None if o["epsilon_c"] is None else float(o["epsilon_c"])
    return Objective(
        name="tunix ppo",
        advantage=GAE(float(o["gamma"]), float(o["gae_lambda"])),
        loss=RatioClip(_or(o["epsilon_low"], epsilon), _or(o["epsilon_high"], epsilon), dual),
        aggregation=Aggregation("token-mean"),
        entropy=EntropyBonus(entropy) if entropy else None,
        reward_kl=_kl(o, "kl_method"),
        strict=False,
    )


def tunix(config: Mapping[str, Any]) -> Objective:
    """Return what tunix computes for options of its GRPOConfig, or of its PPOConfig with policy_loss_fn "ppo".

    The default KL is 0.04 · k1 in the loss, whose expected gradient is zero. "sequence-mean-token-scale" divides by the
    padded width. epsilon_high, epsilon_c and sampler_is exist in some of tunix's config classes only.

    Args:
        config: options under tunix's names.

    Returns:
        Objective; with policy_loss_fn "ppo" its advantages come from a critic.

    Raises:
        ValueError: for an unknown option or value.

    Reference:
        google-tunix 0.1.7, tunix/rl/algo_core.py and tunix/rl/common.py (docs/dialects.md).

    >>> from rl_fn import dialects
    >>> print(dialects.tunix({}).explain())
    tunix grpo: minimise seq-mean-token-mean of ℓ + 0.04·kl
      ℓ = −min(ρA, clip(ρ, 1 − 0.2, 1 + 0.2)A), ρ per token to the old policy, log ρ in ±20
      A = tunix's grpo
      kl = d, d = logprobs − ref_logprobs
      ρ = exp(logprobs − old_logprobs)

    """
    if config.get("policy_loss_fn", "grpo") == "ppo":
        return _ppo(read("tunix", config, PPO))
    o = read("tunix", config, GRPO)
    one_of("tunix", "policy_loss_fn", o["policy_loss_fn"], ("grpo", "ppo"))
    kind = one_of("tunix", "loss_algo", o["loss_algo"], ("grpo", "gspo-token"))
    estimator = one_of("tunix", "advantage_estimator", o["advantage_estimator"], ("grpo", "rloo", "drgrpo"))
    one_of("tunix", "sampler_is", o["sampler_is"], (None, "token"))
    epsilon = float(o["epsilon"])
    sequence = {"level": "sequence-token", "cap": 10.0} if kind == "gspo-token" else {}
    dual = None if o["epsilon_c"] is None else float(o["epsilon_c"])
    high = epsilon if o["epsilon_high"] is None else float(o["epsilon_high"])
    band = ImportanceBand(high=float(o["sampler_is_threshold"]), limit=20.0)
    return Objective(
        name=f"tunix {kind}",
        advantage=TunixGroup(estimator),
        loss=RatioClip(epsilon, high, dual, limit=20.0, **sequence),
        aggregation=AGGREGATIONS[one_of("tunix", "loss_agg_mode", o["loss_agg_mode"], AGGREGATIONS)],
        kl=_kl(o, "kl_loss_mode"),
        correction=band if o["sampler_is"] else None,
        strict=False,
    )
