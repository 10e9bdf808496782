"""PPO, with a critic (PPO, VAPO) or with returns whitened over the batch in its place."""

from rl_fn._numerics import Number, present
from rl_fn.objectives.components import (
    GAE,
    Aggregation,
    DecoupledPPO,
    LengthAdaptiveGAE,
    PositiveExample,
    PPOClip,
    ReinforcePPAdvantage,
    ReinforcePPBaselineAdvantage,
    Sum,
    ValueLoss,
)
from rl_fn.objectives.objective import Objective


def ppo(
    *, gamma: Number = 1.0, lam: Number = 0.95, whiten: bool = True, clip_low: Number = 0.2, clip_high: Number = 0.2
) -> Objective:
    """PPO with a critic; the KL penalty of RLHF belongs in the token rewards: replace(reward_kl=KL("k1", β)).

    token-mean of −min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)A), A from GAE;  critic (V − R)²

    Advantages and returns come from advantages(Rollouts(rewards, mask, values=...)), the critic's loss from
    value_parts (batch.values, batch.returns). γ = 1 and the token-mean are RLHF's: the paper, on control tasks, has
    γ = 0.99.

    Args:
        gamma: discount.
        lam: GAE's λ.
        whiten: whiten the advantages over the batch, as RLHF trainers do (the paper does not).
        clip_low: ε_low.
        clip_high: ε_high.

    Reference:
        Schulman et al., arXiv 1707.06347, equations 7 and 11 (λ = 0.95, ε = 0.2 in its experiments).

    >>> print(ppo().loss.explain())
    −min(ρA, clip(ρ, 1 − 0.2, 1 + 0.2)A)

    """
    return Objective(
        "ppo", GAE(gamma, lam, whiten), PPOClip(clip_low, clip_high), Aggregation("token-mean"), value=ValueLoss()
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
) -> Objective:
    """VAPO: PPO with a λ that grows with the completion, clip-higher, and a language-model loss on correct completions.

    token-mean of −min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)A) − μ log π where correct;  λ = 1 − 1/(αl)

    The critic's returns have a λ of their own (1 in the paper), and λ is held above 0, which the paper does not
    say. Its language-model loss is averaged over the tokens of correct completions, here over all tokens with the
    rest of the loss, so that micro-batches add up: μ is the paper's only when all completions are correct. It
    pretrains the critic, which is the trainer's affair. One sequence a row: a packed batch gets its advantages
    before packing.

    Args:
        gamma: discount.
        critic_lam: λ of the critic's returns.
        lam_alpha: α > 0, of the policy's λ.
        whiten: whiten the advantages over the batch.
        clip_low: ε_low.
        clip_high: ε_high.
        positive_coef: μ; 0 needs no batch.correct.

    Reference:
        Yue et al. (VAPO), arXiv 2504.05118, equations 5 and 8 to 10, section 5.1 (α, ε, μ).

    >>> print(vapo().loss.explain())
    [−min(ρA, clip(ρ, 1 − 0.2, 1 + 0.28)A)] + [−0.1 log π where correct]

    """
    clip = PPOClip(clip_low, clip_high)
    loss = Sum((clip, PositiveExample(positive_coef))) if present(positive_coef) else clip
    return Objective(
        "vapo",
        LengthAdaptiveGAE(gamma, critic_lam, whiten, lam_alpha),
        loss,
        Aggregation("token-mean"),
        value=ValueLoss(),
    )


def decoupled_ppo(
    *, gamma: Number = 1.0, clip_low: Number = 0.2, clip_high: Number = 0.2, weight_cap: Number | None = None
) -> Objective:
    """AReaL's decoupled PPO: the trust region is around a recent policy, the data come from an older one.

    token-mean of −(π_old/μ) min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)A),  A = reward whitened over the batch

    π_old (batch.old_logprobs) is the paper's proximal policy, μ (batch.rollout_logprobs) its behaviour policy. There is
    no critic. The weight is the correction: a second one is refused.

    Args:
        gamma: discount of the returns.
        clip_low: ε_low.
        clip_high: ε_high.
        weight_cap: bound of π_old/μ; none in the paper.

    Reference:
        Fu et al. (AReaL), arXiv 2505.24298, equations 4 and 5, appendix B.1 (ε, γ); after Hilton et al.,
        arXiv 2110.00641.

    >>> print(decoupled_ppo().loss.explain())
    exp(old_logprobs − rollout_logprobs) · −min(ρA, clip(ρ, 1 − 0.2, 1 + 0.2)A)

    """
    return Objective(
        "decoupled_ppo",
        ReinforcePPAdvantage(gamma),
        DecoupledPPO(clip_low, clip_high, weight_cap=weight_cap),
        Aggregation("token-mean"),
    )


def reinforce_pp(
    *, gamma: Number = 1.0, eps: Number = 1e-8, clip_low: Number = 0.2, clip_high: Number = 0.2
) -> Objective:
    """REINFORCE++: PPO's clip on returns whitened over the batch; no critic and no group.

    token-mean of −min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)A),  A = (G − mean)/√(var + ε) over the batch's tokens

    The paper has a KL penalty on each token's reward, reward_kl=KL("k1", β); its β is not a default. It adds ε to the
    standard deviation; PPO's clip of 0.2 is that of its first version.

    Args:
        gamma: discount.
        eps: added to the variance.
        clip_low: ε_low.
        clip_high: ε_high.

    Reference:
        Hu et al. (REINFORCE++), arXiv 2501.03262, equations 4 and 5 of its version 9.

    >>> print(reinforce_pp().advantage.explain())
    (G − mean)/√(var + 1e-08) over the batch's tokens, Gₜ = rₜ + 1 Gₜ₊₁

    """
    return Objective(
        "reinforce_pp", ReinforcePPAdvantage(gamma, eps), PPOClip(clip_low, clip_high), Aggregation("token-mean")
    )


def reinforce_pp_baseline(*, eps: Number = 1e-8, clip_low: Number = 0.2, clip_high: Number = 0.2) -> Objective:
    """REINFORCE++ with a group baseline: the group's mean off, then whitened over the batch.

    token-mean of −min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)A),  A = (d − mean)/√(var + ε),  d = r − mean of the group

    The paper has a k2 penalty in the loss, kl=KL("k2", β); its coefficient is not a default.

    Args:
        eps: added to the variance.
        clip_low: ε_low.
        clip_high: ε_high.

    Reference:
        Hu et al. (REINFORCE++), arXiv 2501.03262, equations 6 to 8 of its version 9.

    >>> print(reinforce_pp_baseline().advantage.explain())
    (d − mean)/√(var + 1e-08) over the batch's tokens, d = r − mean of the group

    """
    return Objective(
        "reinforce_pp_baseline",
        ReinforcePPBaselineAdvantage(eps),
        PPOClip(clip_low, clip_high),
        Aggregation("token-mean"),
    )
