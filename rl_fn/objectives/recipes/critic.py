"""PPO, with a critic (PPO, VAPO) or with returns whitened over the batch in its place."""

from typing import Any

from rl_fn._numerics import Number
from rl_fn.objectives.components import (
    GAE,
    Clip,
    DecoupledClip,
    LengthAdaptiveGAE,
    PositiveExample,
    Sum,
    ValueLoss,
    WhitenedGroup,
    WhitenedReturns,
)
from rl_fn.objectives.objective import Objective
from rl_fn.objectives.recipes.common import assemble, optional


def ppo(
    *,
    gamma: Number = 1.0,
    lam: Number = 0.95,
    whiten: bool = True,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    dual_clip: Number | None = None,
    value_clip: Number | None = None,
    reward_kl_coef: Number = 0.0,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k2",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """PPO with a critic; the KL penalty of RLHF belongs in the token rewards, kl_coef adds one to the loss.

    token-mean of −min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)A), A from GAE;  critic (V − R)²

    Advantages and returns come from token_advantages, the critic's loss from value_parts (batch.values, batch.returns).
    γ = 1 and the token-mean are RLHF's: the paper, on control tasks, has γ = 0.99.

    Reads token_rewards, values; of a Batch nothing beyond its first four fields.

    Args:
        gamma: discount.
        lam: GAE's λ.
        whiten: whiten the advantages over the batch, as RLHF trainers do (the paper does not).
        clip_low: ε_low.
        clip_high: ε_high.
        dual_clip: c > 1, bound of the loss for A < 0; none in the paper.
        value_clip: bound of the critic's step, see value_clip; needs batch.old_values. None in the paper.
        reward_kl_coef: β of a k1 penalty in the rewards; 0 needs no ref_logprobs.
        kl_coef: β of a KL penalty in the loss; 0 needs no ref_logprobs.
        kl_estimator: "k1", "k2", "k3", "abs", "k1+" or "k3+".
        entropy_coef: coefficient of the entropy bonus; 0 needs no entropies.
        correction_cap: cap of truncated importance weights against rollout_logprobs; None for no correction.

    Returns:
        Objective.

    Raises:
        ValueError: for constants that a piece refuses.

    Reference:
        Schulman et al., arXiv 1707.06347, equations 7 and 11 (λ = 0.95, ε = 0.2 in its experiments).

    >>> print(ppo().loss.explain())
    −min(ρA, clip(ρ, 1 − 0.2, 1 + 0.2)A)

    """
    return assemble(
        "ppo",
        GAE(float(gamma), float(lam), whiten),
        Clip(float(clip_low), float(clip_high), optional(dual_clip)),
        "token-mean",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
        reward_kl_coef=reward_kl_coef,
        value=ValueLoss(optional(value_clip)),
    )


def vapo(
    *,
    gamma: Number = 1.0,
    critic_lam: Number = 1.0,
    lam_alpha: Number = 0.05,
    whiten: bool = True,
    clip_low: Number = 0.2,
    clip_high: Number = 0.28,
    positive_coef: Number = 0.1,
    value_clip: Number | None = None,
    reward_kl_coef: Number = 0.0,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k2",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """VAPO: PPO with a λ that grows with the answer, clip-higher, and a language-model loss on correct answers.

    token-mean of −min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)A) − μ log π where correct;  λ = 1 − 1/(αl)

    The critic's returns have a λ of their own (1 in the paper), and λ is held above 0, which the paper does not say.
    Its language-model loss is averaged over the tokens of correct answers, here over all tokens with the rest of the
    loss, so that micro-batches add up: μ is the paper's only when all answers are correct. It pretrains the critic,
    which is the trainer's affair. One sequence a row: a packed batch gets its advantages before packing.

    Reads token_rewards, values; of a Batch correct too.

    Args:
        gamma: discount.
        critic_lam: λ of the critic's returns.
        lam_alpha: α > 0, of the policy's λ.
        whiten: whiten the advantages over the batch.
        clip_low: ε_low.
        clip_high: ε_high.
        positive_coef: μ; 0 needs no batch.correct.
        value_clip: bound of the critic's step, see value_clip; needs batch.old_values.
        reward_kl_coef: β of a k1 penalty in the rewards; 0 needs no ref_logprobs.
        kl_coef: β of a KL penalty in the loss; 0 needs no ref_logprobs.
        kl_estimator: "k1", "k2", "k3", "abs", "k1+" or "k3+".
        entropy_coef: coefficient of the entropy bonus; 0 needs no entropies.
        correction_cap: cap of truncated importance weights against rollout_logprobs; None for no correction.

    Returns:
        Objective.

    Raises:
        ValueError: for constants that a piece refuses.

    Reference:
        Yue et al. (VAPO), arXiv 2504.05118, equations 5 and 8 to 10, section 5.1 (α, ε, μ).

    >>> print(vapo().loss.explain())
    [−min(ρA, clip(ρ, 1 − 0.2, 1 + 0.28)A)] + [−0.1 log π where correct]

    """
    clip: Any = Clip(float(clip_low), float(clip_high))
    loss = Sum((clip, PositiveExample(float(positive_coef)))) if positive_coef else clip
    return assemble(
        "vapo",
        LengthAdaptiveGAE(float(gamma), float(critic_lam), whiten, float(lam_alpha)),
        loss,
        "token-mean",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
        reward_kl_coef=reward_kl_coef,
        value=ValueLoss(optional(value_clip)),
    )


def decoupled_ppo(
    *,
    gamma: Number = 1.0,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    dual_clip: Number | None = None,
    weight_cap: Number | None = None,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: Number = 0.0,
) -> Objective:
    """AReaL's decoupled PPO: the trust region is around a recent policy, the data come from an older one.

    token-mean of −(π_old/μ) min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)A),  A = reward whitened over the batch

    π_old (batch.old_logprobs) is the paper's proximal policy, μ (batch.rollout_logprobs) its behaviour policy. There is
    no critic. The weight is the correction: a second one is refused.

    Reads rewards (`*batch G`); of a Batch rollout_logprobs too.

    Args:
        gamma: discount of the returns.
        clip_low: ε_low.
        clip_high: ε_high.
        dual_clip: c > 1, bound of the loss for A < 0; none in the paper.
        weight_cap: bound of π_old/μ; none in the paper.
        kl_coef: β of a KL penalty in the loss; 0 needs no ref_logprobs.
        kl_estimator: "k1", "k2", "k3", "abs", "k1+" or "k3+".
        entropy_coef: coefficient of the entropy bonus; 0 needs no entropies.

    Returns:
        Objective.

    Raises:
        ValueError: for constants that a piece refuses.

    Reference:
        Fu et al. (AReaL), arXiv 2505.24298, equations 4 and 5, appendix B.1 (ε, γ); after Hilton et al.,
        arXiv 2110.00641.

    >>> print(decoupled_ppo().loss.explain())
    exp(old_logprobs − rollout_logprobs) · −min(ρA, clip(ρ, 1 − 0.2, 1 + 0.2)A)

    """
    return assemble(
        "decoupled_ppo",
        WhitenedReturns(float(gamma)),
        DecoupledClip(float(clip_low), float(clip_high), optional(dual_clip), optional(weight_cap)),
        "token-mean",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )


def reinforce_pp(
    *,
    gamma: Number = 1.0,
    eps: Number = 1e-8,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    dual_clip: Number | None = None,
    reward_kl_coef: Number = 0.0,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k2",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """REINFORCE++: PPO's clip on returns whitened over the batch; no critic and no group.

    token-mean of −min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)A),  A = (G − mean)/√(var + ε) over the batch's tokens

    The paper has a KL penalty on each token's reward, reward_kl_coef here; its β is not a default. It adds ε to the
    standard deviation; PPO's clip of 0.2 is that of its first version.

    Reads rewards (`*batch G`); of a Batch nothing beyond its first four fields.

    Args:
        gamma: discount.
        eps: added to the variance.
        clip_low: ε_low.
        clip_high: ε_high.
        dual_clip: c > 1, bound of the loss for A < 0; none in the paper.
        reward_kl_coef: β of a k1 penalty in the rewards; 0 needs no ref_logprobs.
        kl_coef: β of a KL penalty in the loss; 0 needs no ref_logprobs.
        kl_estimator: "k1", "k2", "k3", "abs", "k1+" or "k3+".
        entropy_coef: coefficient of the entropy bonus; 0 needs no entropies.
        correction_cap: cap of truncated importance weights against rollout_logprobs; None for no correction.

    Returns:
        Objective.

    Raises:
        ValueError: for constants that a piece refuses.

    Reference:
        Hu et al. (REINFORCE++), arXiv 2501.03262, equations 4 and 5 of its version 9.

    >>> print(reinforce_pp().advantage.explain())
    (G − mean)/√(var + 1e-08) over the batch's tokens, Gₜ = rₜ + 1 Gₜ₊₁

    """
    return assemble(
        "reinforce_pp",
        WhitenedReturns(float(gamma), float(eps)),
        Clip(float(clip_low), float(clip_high), optional(dual_clip)),
        "token-mean",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
        reward_kl_coef=reward_kl_coef,
    )


def reinforce_pp_baseline(
    *,
    eps: Number = 1e-8,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    dual_clip: Number | None = None,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k2",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """REINFORCE++ with a group baseline: the group's mean off, then whitened over the batch.

    token-mean of −min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)A),  A = (d − mean)/√(var + ε),  d = r − mean of the group

    The paper has a k2 penalty in the loss, kl_coef here; its coefficient is not a default.

    Reads rewards (`*batch G`); of a Batch nothing beyond its first four fields.

    Args:
        eps: added to the variance.
        clip_low: ε_low.
        clip_high: ε_high.
        dual_clip: c > 1, bound of the loss for A < 0; none in the paper.
        kl_coef: β of a KL penalty in the loss; 0 needs no ref_logprobs.
        kl_estimator: "k1", "k2", "k3", "abs", "k1+" or "k3+".
        entropy_coef: coefficient of the entropy bonus; 0 needs no entropies.
        correction_cap: cap of truncated importance weights against rollout_logprobs; None for no correction.

    Returns:
        Objective.

    Raises:
        ValueError: for constants that a piece refuses.

    Reference:
        Hu et al. (REINFORCE++), arXiv 2501.03262, equations 6 to 8 of its version 9.

    >>> print(reinforce_pp_baseline().advantage.explain())
    (d − mean)/√(var + 1e-08) over the batch's tokens, d = r − mean of the group

    """
    return assemble(
        "reinforce_pp_baseline",
        WhitenedGroup(float(eps)),
        Clip(float(clip_low), float(clip_high), optional(dual_clip)),
        "token-mean",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
    )
