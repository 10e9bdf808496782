"""GRPO and its descendants with PPO's clip per token."""

from collections.abc import Sequence

from rl_fn._numerics import Number, present
from rl_fn.objectives.components import (
    KL,
    Aggregation,
    DynamicSampling,
    GDPOAdvantage,
    GiGPOAdvantage,
    GRPOAdvantage,
    GRPOPassKAdvantage,
    PassKAdvantage,
    PPOClip,
)
from rl_fn.objectives.objective import Objective


def grpo(
    *, scale: str = "group", eps: Number = 1e-6, clip_low: Number = 0.2, clip_high: Number = 0.2, kl_coef: Number = 0.04
) -> Objective:
    """GRPO as published: group-normalised rewards, every completion weighted alike, a k3 penalty to the reference.

    seq-mean-token-mean of −min(ρA, clip(ρ)A) + β k3,  A = (r − mean)/(std + ε)

    The paper gives β = 0.04 and no ε for the clip; 0.2 is PPO's.

    Args:
        scale: "group", "batch" or "none", see grpo_advantages.
        eps: added to the standard deviation.
        clip_low: ε_low.
        clip_high: ε_high.
        kl_coef: β of the k3 penalty in the loss; 0 needs no ref_logprobs.

    Reference:
        Shao et al. (DeepSeekMath), arXiv 2402.03300, equations 3 and 4, section 4.2 (β = 0.04).

    >>> print(grpo().explain())
    grpo: minimise seq-mean-token-mean of ℓ + 0.04·kl
      ℓ = −min(ρA, clip(ρ, 1 − 0.2, 1 + 0.2)A)
      A = (r − mean)/(std of the group + 1e-06)
      kl = e^(−d) + d − 1, d = logprobs − ref_logprobs
      ρ = exp(logprobs − old_logprobs)

    """
    return Objective(
        "grpo",
        GRPOAdvantage(scale, eps),
        PPOClip(clip_low, clip_high),
        Aggregation("seq-mean-token-mean"),
        kl=KL("k3", kl_coef) if present(kl_coef) else None,
    )


def dr_grpo(
    *, max_completion_length: Number | None = None, clip_low: Number = 0.2, clip_high: Number = 0.2
) -> Objective:
    """GRPO without its two biases: no division by the standard deviation, none by the completion's length.

    seq-mean-token-sum (/ max_completion_length) of −min(ρA, clip(ρ)A),  A = r − mean

    Args:
        max_completion_length: generation budget in tokens to divide by, the paper's MAX_TOKENS; None divides by
            completions only.
        clip_low: ε_low.
        clip_high: ε_high.

    Reference:
        Liu et al., arXiv 2503.20783, section 3.2, appendix G (ε = 0.2, no KL).

    >>> dr_grpo(max_completion_length=1024).aggregation
    Aggregation(mode='seq-mean-token-sum-norm', max_completion_length=1024)

    """
    mode = "seq-mean-token-sum" if max_completion_length is None else "seq-mean-token-sum-norm"
    mean = Aggregation(mode, max_completion_length)
    return Objective("dr_grpo", GRPOAdvantage("none"), PPOClip(clip_low, clip_high), mean)


def dapo(*, eps: Number = 1e-6, clip_low: Number = 0.2, clip_high: Number = 0.28) -> Objective:
    """DAPO's loss: GRPO's advantage, clip-higher, every token weighted alike, no KL penalty.

    token-mean of −min(ρA, clip(ρ, 1 − 0.2, 1 + 0.28)A),  A = (r − mean)/(std + ε)

    Groups whose rewards are all equal are not trained on, nor counted (dynamic_sampling). The overlong penalty acts on
    rewards, before this objective (overlong_penalty).

    Args:
        eps: added to the standard deviation.
        clip_low: ε_low.
        clip_high: ε_high.

    Reference:
        Yu et al., arXiv 2503.14476, equation 8, section 4.1 (clips).

    >>> print(dapo().loss.explain())
    −min(ρA, clip(ρ, 1 − 0.2, 1 + 0.28)A)

    """
    return Objective(
        "dapo",
        GRPOAdvantage("group", eps),
        PPOClip(clip_low, clip_high),
        Aggregation("token-mean"),
        dynamic_sampling=DynamicSampling(),
    )


def gdpo(
    *, weights: Sequence[float] | None = None, eps: Number = 1e-6, clip_low: Number = 0.2, clip_high: Number = 0.2
) -> Objective:
    """GDPO: GRPO's loss on several rewards, each normalised in its group before they are added.

    seq-mean-token-mean of −min(ρA, clip(ρ)A),  A = S whitened over the batch,  S = Σₖ wₖ (rₖ − mean)/(std + ε)

    Rewards are `*batch R G`. The loss is GRPO's, as in the paper, which gives no ε for the clip; 0.2 is PPO's.

    Args:
        weights: w, one a reward; all 1 by default.
        eps: added to the standard deviation.
        clip_low: ε_low.
        clip_high: ε_high.

    Reference:
        Liu et al. (GDPO), arXiv 2601.05242, equations 3 to 7.

    >>> print(gdpo().advantage.explain())
    S whitened over the batch, S = Σₖ wₖ (rₖ − mean)/(std of the group + 1e-06), w = 1

    """
    return Objective(
        "gdpo",
        GDPOAdvantage(None if weights is None else tuple(weights), eps),
        PPOClip(clip_low, clip_high),
        Aggregation("seq-mean-token-mean"),
    )


def gigpo(
    *,
    gamma: Number = 0.95,
    weight: Number = 1.0,
    scale: str = "group",
    eps: Number = 1e-6,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
) -> Objective:
    """GiGPO: GRPO for agents, with a second advantage among the steps that began in the same state.

    seq-mean-token-mean of −min(ρA, clip(ρ)A) + β k3,  A = (R − mean)/(std + ε) + ω (G − mean of the state)/(std + ε)

    A row is a step. Rewards are `*batch G S`, the mask `*batch G S T`; advantages come from
    advantages(Rollouts(rewards, mask, state_ids=...)). The paper has a KL penalty of β = 0.01 (0.001 for
    search), which needs a reference policy and is 0 here; PPO's clip is our choice.

    Args:
        gamma: discount per step of G.
        weight: ω, of the step's advantage.
        scale: "group" divides by std + ε, "none" does not.
        eps: added to the standard deviation.
        clip_low: ε_low.
        clip_high: ε_high.

    Reference:
        Feng et al. (GiGPO), arXiv 2505.10978, equations 3 and 5 to 9, appendix E.1 (γ, ω).

    >>> print(gigpo().advantage.explain())
    (R − mean of the group)/(std + 1e-06) + 1 (G − mean of the state)/(std + 1e-06), Gₜ = rₜ + 0.95 Gₜ₊₁

    """
    return Objective(
        "gigpo",
        GiGPOAdvantage(gamma, weight, scale, eps),
        PPOClip(clip_low, clip_high),
        Aggregation("seq-mean-token-mean"),
    )


def passk(*, k: int = 4, clip_low: Number = 0.2, clip_high: Number = 0.28) -> Objective:
    """Pass@k training: DAPO's loss on the analytic advantage of the best of k completions.

    token-mean of −min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)A),  A = (mean R of the sets of k with the completion − mean
    R)/(std of R)

    Clip-higher and the token-mean are DAPO's, as in the paper; k = 4 is our choice. A group needs more than k
    completions: k of them are one set, with advantage 0.

    Args:
        k: completions in a set, from 1 to below the group's size.
        clip_low: ε_low.
        clip_high: ε_high.

    Raises:
        ValueError: by advantages() for a group of fewer than k.

    Reference:
        Chen et al. (Pass@k Training), arXiv 2508.10751, section 2.1 and equations 11 to 15.

    >>> print(passk().advantage.explain())
    (mean R of the sets of 4 with the completion − mean R)/(std of R), R = the set's best r

    """
    return Objective("passk", PassKAdvantage(k), PPOClip(clip_low, clip_high), Aggregation("token-mean"))


def grpo_passk(
    *, divide_by_std: bool = True, eps: Number = 1e-6, clip_low: Number = 0.2, clip_high: Number = 0.2
) -> Objective:
    """GRPO on the best completion alone, by its lead over the second best (verl's grpo_passk).

    token-mean of −min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)A),  A = (r₁ − r₂)/(std + ε) for the best, else 0

    Args:
        divide_by_std: divide by std + ε, or not.
        eps: added to the standard deviation.
        clip_low: ε_low.
        clip_high: ε_high.

    Reference:
        Tang et al., arXiv 2503.19595, for the lead of the best completion; the std, the clip and the mean are verl's.

    >>> print(grpo_passk().advantage.explain())
    (r₁ − r₂)/(std + 1e-06) for the group's best, else 0

    """
    return Objective(
        "grpo_passk", GRPOPassKAdvantage(divide_by_std, eps), PPOClip(clip_low, clip_high), Aggregation("token-mean")
    )
