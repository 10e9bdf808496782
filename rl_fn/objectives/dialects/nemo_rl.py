"""NeMo-RL: ClippedPGLossFn and its advantage estimators, from its documentation and source; not run."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from rl_fn._numerics import require
from rl_fn.objectives.batch import Batch
from rl_fn.objectives.components import KL, Aggregation, Reinforce
from rl_fn.objectives.dialects import dialect_advantages as advantages
from rl_fn.objectives.dialects.dialect_losses import ImportanceBand, RatioClip, TokenLoss
from rl_fn.objectives.dialects.dialect_terms import BoundedKL
from rl_fn.objectives.dialects.options import one_of, read
from rl_fn.objectives.objective import Objective
from rl_fn.policy_losses import token_level as token_losses

DEFAULTS: dict[str, Any] = {
    "grpo.adv_estimator.name": "grpo",
    "grpo.adv_estimator.normalize_rewards": True,
    "grpo.adv_estimator.use_leave_one_out_baseline": True,
    "grpo.adv_estimator.minus_baseline": True,
    "grpo.adv_estimator.gae_gamma": 1.0,
    "grpo.adv_estimator.gae_lambda": 0.95,
    "grpo.adv_estimator.normalize_advantages": True,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    "loss_fn.reference_policy_kl_type": "k3",
    "loss_fn.kl_input_clamp_value": 20.0,
    "loss_fn.kl_output_clamp_value": 10.0,
    "loss_fn.use_kl_in_reward": False,
    "loss_fn.use_on_policy_kl_approximation": False,
    "loss_fn.ratio_clip_min": 0.2,
    "loss_fn.ratio_clip_max": 0.2,
    "loss_fn.ratio_clip_c": None,
    "loss_fn.disable_ppo_ratio": False,
    "loss_fn.use_cispo": False,
    "loss_fn.sequence_level_importance_ratios": False,
    "loss_fn.token_level_loss": True,
    "loss_fn.use_importance_sampling_correction": False,
    "loss_fn.truncated_importance_sampling_type": None,
    "loss_fn.truncated_importance_sampling_ratio": None,
    "loss_fn.truncated_importance_sampling_ratio_min": None,
}


def _loss(o: dict[str, Any]) -> Callable[[Batch], jax.Array]:
    low, high = float(o["loss_fn.ratio_clip_min"]), float(o["loss_fn.ratio_clip_max"])
    dual = None if o["loss_fn.ratio_clip_c"] is None else float(o["loss_fn.ratio_clip_c"])
    sequence = o["loss_fn.sequence_level_importance_ratios"]
    if o["loss_fn.use_cispo"]:
        plain = not sequence and dual is None and not o["loss_fn.disable_ppo_ratio"] and o["loss_fn.token_level_loss"]
        require(plain, "nemo_rl: use_cispo goes with token_level_loss alone: no dual clip, no sequence ratios")
        return TokenLoss(token_losses.cispo, (("clip_low", low), ("clip_high", high)))
    if o["loss_fn.disable_ppo_ratio"]:
        require(dual is None, "nemo_rl: ratio_clip_c with disable_ppo_ratio is not covered")
        return Reinforce()
    require(not (sequence and o["loss_fn.token_level_loss"]), "nemo_rl: sequence ratios need token_level_loss=False")
    return RatioClip(low, high, dual, level="sequence" if sequence else "token")


def _correction(o: dict[str, Any]) -> ImportanceBand | None:
    kind = o["loss_fn.truncated_importance_sampling_type"]
    high: Any = o["loss_fn.truncated_importance_sampling_ratio"]
    low: Any = o["loss_fn.truncated_importance_sampling_ratio_min"]
    one_of("nemo_rl", "truncated_importance_sampling_type", kind, (None, "tis", "icepop", "seq-mask-tis"))
    if not o["loss_fn.use_importance_sampling_correction"]:
        require(kind is None, "nemo_rl: truncation needs use_importance_sampling_correction=True")
        return None
    level = "sequence_sum" if o["loss_fn.sequence_level_importance_ratios"] else "token"
    if kind is None:
        return ImportanceBand(level=level)
    if high is None or high <= 0:
        raise ValueError(f"nemo_rl: truncated_importance_sampling_ratio must be positive, got {high}")
    if low is None:
        require(kind == "tis", f"nemo_rl: {kind} needs truncated_importance_sampling_ratio_min")
        low = 0.0
    low, high = float(low), float(high)
    if kind == "seq-mask-tis":
        require(level == "token", "nemo_rl: seq-mask-tis does not go with sequence_level_importance_ratios")
        return ImportanceBand(low, high, "mask", "sequence", keep_tokens=True)
    return ImportanceBand(low, high, "clip" if kind == "tis" else "mask", level)


def _kl(o: dict[str, Any]) -> KL | None:
    coef = float(o["loss_fn.reference_policy_kl_penalty"])
    if not coef:
        return None
    name = one_of("nemo_rl", "kl type", o["loss_fn.reference_policy_kl_type"], ("k1", "k2", "k3"))
    inside, bound = o["loss_fn.kl_input_clamp_value"], o["loss_fn.kl_output_clamp_value"]
    inside = math.inf if inside is None else float(inside)
    bound = math.inf if bound is None else float(bound)
    if o["loss_fn.use_kl_in_reward"]:
        return BoundedKL(name, coef, low=-inside, high=inside, bound=bound)
    if o["loss_fn.use_on_policy_kl_approximation"]:
        return BoundedKL(name, coef, low=-inside, high=inside, bound=bound, weight="rollout")
    return BoundedKL(name, coef, low=-inside, high=inside, bound=bound, gradient="score")


def nemo_rl(config: Mapping[str, Any]) -> Objective:
    """Return what NeMo-RL computes for options of its configuration file, as read from its source: it was not run.

    NeMo-RL is not on PyPI. The baseline and the std leave the completion out; the std is not used where it is 0;
    the KL in the loss carries the gradient of the sampling probability as well.

    Args:
        config: options under NeMo-RL's names, from `grpo` and `loss_fn`, nested or joined by dots.

    Returns:
        Objective; with the estimator "gae" its advantages come from a critic.

    Raises:
        ValueError: for an unknown option or value, or a combination that NeMo-RL refuses.

    Reference:
        NVIDIA-NeMo/RL, nemo_rl/algorithms/loss/loss_functions.py and advantage_estimator.py (docs/dialects.md).

    >>> import jax.numpy as jnp
    >>> from rl_fn import Rollouts, dialects
    >>> a = dialects.nemo_rl({}).advantages(Rollouts(jnp.array([0.25, 0.25, 0.75]), jnp.ones((3, 1), bool))).advantages
    >>> print(a[:, 0].round(3))
    [-0.707 -0.707  0.5  ]

    """
    o = read("nemo_rl", config, DEFAULTS)
    estimator = one_of("nemo_rl", "adv_estimator.name", o["grpo.adv_estimator.name"], ("gae", *advantages.NEMO_RL))
    flags = ("normalize_rewards", "use_leave_one_out_baseline", "minus_baseline")
    scale, leave_out, minus = (bool(o[f"grpo.adv_estimator.{flag}"]) for flag in flags)
    gamma, lam = float(o["grpo.adv_estimator.gae_gamma"]), float(o["grpo.adv_estimator.gae_lambda"])
    critic = advantages.BiasedGAE(gamma, lam, bool(o["grpo.adv_estimator.normalize_advantages"]))
    outcome = advantages.NeMoRLAdvantage(estimator, scale, leave_out, minus)
    kl, in_reward = _kl(o), bool(o["loss_fn.use_kl_in_reward"])
    return Objective(
        name="nemo_rl clipped_pg",
        advantage=critic if estimator == "gae" else outcome,
        loss=_loss(o),
        aggregation=Aggregation("token-mean" if o["loss_fn.token_level_loss"] else "seq-mean-token-mean"),
        kl=None if in_reward else kl,
        correction=_correction(o),
        reward_kl=kl if in_reward else None,
        strict=False,
    )
