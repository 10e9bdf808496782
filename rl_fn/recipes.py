"""Published algorithms as Objectives with their papers' constants; each piece is replaceable."""

from rl_fn._numerics import Number
from rl_fn.objectives import Objective
from rl_fn.pieces import (
    GAE,
    KL,
    Aggregation,
    Clip,
    Entropy,
    GroupNormalised,
    LeaveOneOut,
    RawReward,
    Reinforce,
    TruncatedImportance,
)


def _kl(estimator: str, coef: Number) -> KL | None:
    return KL(estimator, float(coef)) if coef else None


def _entropy(coef: Number) -> Entropy | None:
    return Entropy(float(coef)) if coef else None


def _correction(cap: Number | None) -> TruncatedImportance | None:
    return None if cap is None else TruncatedImportance(float(cap))


def _clip(low: Number, high: Number, dual: Number | None) -> Clip:
    return Clip(float(low), float(high), None if dual is None else float(dual))


def reinforce_objective(
    *,
    baseline: Number = 0.0,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k2",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """Plain REINFORCE on the reward of the whole answer.

    seq-mean-token-sum of −(r − b) log π

    Args:
        baseline: b, a constant.
        kl_coef: β of a KL penalty in the loss; 0 needs no ref_logprobs.
        kl_estimator: "k1", "k2", "k3", "abs", "k1+" or "k3+".
        entropy_coef: coefficient of the entropy bonus; 0 needs no entropies.
        correction_cap: cap of truncated importance weights against rollout_logprobs; None for no correction.

    Returns:
        Objective.

    Raises:
        ValueError: for constants that a piece refuses.

    Reference:
        Williams, Simple Statistical Gradient-Following Algorithms (1992).

    >>> print(reinforce_objective().explain())
    reinforce: minimise seq-mean-token-sum of ℓ
      ℓ = −A log π
      A = r − 0
      ρ = exp(logprobs − old_logprobs)

    """
    return Objective(
        name="reinforce",
        advantage=RawReward(float(baseline)),
        loss=Reinforce(),
        aggregation=Aggregation("seq-mean-token-sum"),
        kl=_kl(kl_estimator, kl_coef),
        correction=_correction(correction_cap),
        entropy=_entropy(entropy_coef),
    )


def ppo(
    *,
    gamma: Number = 1.0,
    lam: Number = 0.95,
    whiten: bool = True,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    dual_clip: Number | None = None,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k2",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """PPO with a critic; the KL penalty of RLHF belongs in the token rewards, kl_coef adds one to the loss.

    token-mean of −min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)A), A from GAE

    Args:
        gamma: discount.
        lam: GAE's λ.
        whiten: whiten the advantages over the batch, as RLHF trainers do (the paper does not).
        clip_low: ε_low.
        clip_high: ε_high.
        dual_clip: c > 1, bound of the loss for A < 0; none in the paper.
        kl_coef: β of a KL penalty in the loss; 0 needs no ref_logprobs.
        kl_estimator: "k1", "k2", "k3", "abs", "k1+" or "k3+".
        entropy_coef: coefficient of the entropy bonus; 0 needs no entropies.
        correction_cap: cap of truncated importance weights against rollout_logprobs; None for no correction.

    Returns:
        Objective; its advantages come from token_advantages.

    Raises:
        ValueError: for constants that a piece refuses.

    Reference:
        Schulman et al., arXiv 1707.06347, equations 7 and 11 (λ = 0.95, ε = 0.2 in its experiments).

    >>> ppo().loss
    Clip(low=0.2, high=0.2, dual=None)

    """
    return Objective(
        name="ppo",
        advantage=GAE(float(gamma), float(lam), whiten),
        loss=_clip(clip_low, clip_high, dual_clip),
        aggregation=Aggregation("token-mean"),
        kl=_kl(kl_estimator, kl_coef),
        correction=_correction(correction_cap),
        entropy=_entropy(entropy_coef),
    )


def grpo(
    *,
    scale: str = "group",
    eps: Number = 1e-6,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    dual_clip: Number | None = None,
    kl_coef: Number = 0.04,
    kl_estimator: str = "k3",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """GRPO as published: group-normalised rewards, every answer weighted alike, a k3 penalty to the reference.

    seq-mean-token-mean of −min(ρA, clip(ρ)A) + β k3,  A = (r − mean)/(std + ε)

    The paper gives β = 0.04 and no ε for the clip; 0.2 is PPO's.

    Args:
        scale: "group", "batch" or "none", see grpo_advantages.
        eps: added to the standard deviation.
        clip_low: ε_low.
        clip_high: ε_high.
        dual_clip: c > 1, bound of the loss for A < 0; none in the paper.
        kl_coef: β; 0 needs no ref_logprobs.
        kl_estimator: "k1", "k2", "k3", "abs", "k1+" or "k3+".
        entropy_coef: coefficient of the entropy bonus; 0 needs no entropies.
        correction_cap: cap of truncated importance weights against rollout_logprobs; None for no correction.

    Returns:
        Objective.

    Raises:
        ValueError: for constants that a piece refuses.

    Reference:
        Shao et al. (DeepSeekMath), arXiv 2402.03300, equations 3 and 4, section 4.2 (β = 0.04).

    >>> print(grpo(kl_coef=0.04).explain())
    grpo: minimise seq-mean-token-mean of ℓ + 0.04·kl
      ℓ = −min(ρA, clip(ρ, 1 − 0.2, 1 + 0.2)A)
      A = (r − mean)/(std of the group + 1e-06)
      kl = e^(−d) + d − 1, d = logprobs − ref_logprobs
      ρ = exp(logprobs − old_logprobs)

    """
    return Objective(
        name="grpo",
        advantage=GroupNormalised(scale, float(eps)),
        loss=_clip(clip_low, clip_high, dual_clip),
        aggregation=Aggregation("seq-mean-token-mean"),
        kl=_kl(kl_estimator, kl_coef),
        correction=_correction(correction_cap),
        entropy=_entropy(entropy_coef),
    )


def dr_grpo(
    *,
    horizon: Number | None = None,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    dual_clip: Number | None = None,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """GRPO without its two biases: no division by the standard deviation, none by the answer's length.

    seq-mean-token-sum (/ horizon) of −min(ρA, clip(ρ)A),  A = r − mean

    Args:
        horizon: generation budget in tokens to divide by, the paper's MAX_TOKENS; None divides by answers only.
        clip_low: ε_low.
        clip_high: ε_high.
        dual_clip: c > 1, bound of the loss for A < 0; none in the paper.
        kl_coef: β of a KL penalty in the loss; 0 (the paper's) needs no ref_logprobs.
        kl_estimator: "k1", "k2", "k3", "abs", "k1+" or "k3+".
        entropy_coef: coefficient of the entropy bonus; 0 needs no entropies.
        correction_cap: cap of truncated importance weights against rollout_logprobs; None for no correction.

    Returns:
        Objective.

    Raises:
        ValueError: for constants that a piece refuses.

    Reference:
        Liu et al., arXiv 2503.20783, section 3.2.

    >>> dr_grpo(horizon=1024).aggregation
    Aggregation(mode='seq-mean-token-sum-norm', horizon=1024.0)

    """
    summed = Aggregation("seq-mean-token-sum")
    return Objective(
        name="dr_grpo",
        advantage=GroupNormalised("none"),
        loss=_clip(clip_low, clip_high, dual_clip),
        aggregation=summed if horizon is None else Aggregation("seq-mean-token-sum-norm", float(horizon)),
        kl=_kl(kl_estimator, kl_coef),
        correction=_correction(correction_cap),
        entropy=_entropy(entropy_coef),
    )


def dapo(
    *,
    eps: Number = 1e-6,
    clip_low: Number = 0.2,
    clip_high: Number = 0.28,
    dual_clip: Number | None = None,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """DAPO's loss: GRPO's advantage, clip-higher, every token weighted alike, no KL penalty.

    token-mean of −min(ρA, clip(ρ, 1 − 0.2, 1 + 0.28)A),  A = (r − mean)/(std + ε)

    Dynamic sampling and the overlong penalty act on rollouts and rewards, before this objective.

    Args:
        eps: added to the standard deviation.
        clip_low: ε_low.
        clip_high: ε_high.
        dual_clip: c > 1, bound of the loss for A < 0; none in the paper.
        kl_coef: β of a KL penalty in the loss; 0 (the paper's) needs no ref_logprobs.
        kl_estimator: "k1", "k2", "k3", "abs", "k1+" or "k3+".
        entropy_coef: coefficient of the entropy bonus; 0 needs no entropies.
        correction_cap: cap of truncated importance weights against rollout_logprobs; None for no correction.

    Returns:
        Objective.

    Raises:
        ValueError: for constants that a piece refuses.

    Reference:
        Yu et al., arXiv 2503.14476, equation 8, section 4.1 (clips).

    >>> dapo().loss
    Clip(low=0.2, high=0.28, dual=None)

    """
    return Objective(
        name="dapo",
        advantage=GroupNormalised("group", float(eps)),
        loss=_clip(clip_low, clip_high, dual_clip),
        aggregation=Aggregation("token-mean"),
        kl=_kl(kl_estimator, kl_coef),
        correction=_correction(correction_cap),
        entropy=_entropy(entropy_coef),
    )


def rloo(
    *,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k2",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """REINFORCE with the mean reward of the other answers as baseline; the paper's KL penalty is part of the reward.

    seq-mean-token-sum of −(r − mean of the others) log π

    Args:
        kl_coef: β of a KL penalty in the loss; 0 needs no ref_logprobs.
        kl_estimator: "k1", "k2", "k3", "abs", "k1+" or "k3+".
        entropy_coef: coefficient of the entropy bonus; 0 needs no entropies.
        correction_cap: cap of truncated importance weights against rollout_logprobs; None for no correction.

    Returns:
        Objective.

    Raises:
        ValueError: for constants that a piece refuses.

    Reference:
        Ahmadian et al., arXiv 2402.14740 (RLOO).

    >>> rloo().advantage
    LeaveOneOut()

    """
    return Objective(
        name="rloo",
        advantage=LeaveOneOut(),
        loss=Reinforce(),
        aggregation=Aggregation("seq-mean-token-sum"),
        kl=_kl(kl_estimator, kl_coef),
        correction=_correction(correction_cap),
        entropy=_entropy(entropy_coef),
    )
