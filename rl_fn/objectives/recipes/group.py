"""GRPO and its descendants with PPO's clip per token."""

from collections.abc import Sequence

from rl_fn._numerics import Number
from rl_fn.objectives.components import Clip, GroupNormalised, SeveralRewards, StepGroups
from rl_fn.objectives.objective import Objective
from rl_fn.objectives.recipes.common import assemble, optional


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

    Reads rewards (`*batch G`); of a Batch ref_logprobs too.

    Args:
        scale: "group", "batch" or "none", see grpo_advantages.
        eps: added to the standard deviation.
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
        Shao et al. (DeepSeekMath), arXiv 2402.03300, equations 3 and 4, section 4.2 (β = 0.04).

    >>> print(grpo().explain())
    grpo: minimise seq-mean-token-mean of ℓ + 0.04·kl
      ℓ = −min(ρA, clip(ρ, 1 − 0.2, 1 + 0.2)A)
      A = (r − mean)/(std of the group + 1e-06)
      kl = e^(−d) + d − 1, d = logprobs − ref_logprobs
      ρ = exp(logprobs − old_logprobs)

    """
    return assemble(
        "grpo",
        GroupNormalised(scale, float(eps)),
        Clip(float(clip_low), float(clip_high), optional(dual_clip)),
        "seq-mean-token-mean",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
    )


def dr_grpo(
    *,
    max_completion_length: Number | None = None,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    dual_clip: Number | None = None,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """GRPO without its two biases: no division by the standard deviation, none by the answer's length.

    seq-mean-token-sum (/ max_completion_length) of −min(ρA, clip(ρ)A),  A = r − mean

    Reads rewards (`*batch G`); of a Batch nothing beyond its first four fields.

    Args:
        max_completion_length: generation budget in tokens to divide by, the paper's MAX_TOKENS; None: by answers only.
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
        Liu et al., arXiv 2503.20783, section 3.2, appendix G (ε = 0.2, no KL).

    >>> dr_grpo(max_completion_length=1024).aggregation
    Aggregation(mode='seq-mean-token-sum-norm', max_completion_length=1024.0)

    """
    return assemble(
        "dr_grpo",
        GroupNormalised("none"),
        Clip(float(clip_low), float(clip_high), optional(dual_clip)),
        "seq-mean-token-sum" if max_completion_length is None else "seq-mean-token-sum-norm",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
        max_completion_length=max_completion_length,
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

    Dynamic sampling and the overlong penalty act on rollouts and rewards, before this objective (group_filter,
    overlong_penalty).

    Reads rewards (`*batch G`); of a Batch nothing beyond its first four fields.

    Args:
        eps: added to the standard deviation.
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
        Yu et al., arXiv 2503.14476, equation 8, section 4.1 (clips).

    >>> print(dapo().loss.explain())
    −min(ρA, clip(ρ, 1 − 0.2, 1 + 0.28)A)

    """
    return assemble(
        "dapo",
        GroupNormalised("group", float(eps)),
        Clip(float(clip_low), float(clip_high), optional(dual_clip)),
        "token-mean",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
    )


def gdpo(
    *,
    weights: Sequence[float] | None = None,
    eps: Number = 1e-6,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    dual_clip: Number | None = None,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """GDPO: GRPO's loss on several rewards, each normalised in its group before they are added.

    seq-mean-token-mean of −min(ρA, clip(ρ)A),  A = S whitened over the batch,  S = Σₖ wₖ (rₖ − mean)/(std + ε)

    Rewards are `*batch R G`. The loss is GRPO's, as in the paper, which gives no ε for the clip; 0.2 is PPO's.

    Reads rewards (`*batch R G`); of a Batch nothing beyond its first four fields.

    Args:
        weights: w, one a reward; all 1 by default.
        eps: added to the standard deviation.
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
        Liu et al. (GDPO), arXiv 2601.05242, equations 3 to 7.

    >>> print(gdpo().advantage.explain())
    S whitened over the batch, S = Σₖ wₖ (rₖ − mean)/(std of the group + 1e-06), w = 1

    """
    return assemble(
        "gdpo",
        SeveralRewards(None if weights is None else tuple(float(w) for w in weights), float(eps)),
        Clip(float(clip_low), float(clip_high), optional(dual_clip)),
        "seq-mean-token-mean",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
    )


def gigpo(
    *,
    gamma: Number = 0.95,
    weight: Number = 1.0,
    scale: str = "group",
    eps: Number = 1e-6,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    dual_clip: Number | None = None,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """GiGPO: GRPO for agents, with a second advantage among the steps that began in the same state.

    seq-mean-token-mean of −min(ρA, clip(ρ)A) + β k3,  A = (R − mean)/(std + ε) + ω (G − mean of the state)/(std + ε)

    A row is a step. Rewards are `*batch G S`, the mask `*batch G S T`; advantages come from
    advantages_of(Rollouts(rewards, mask, state_ids=...)). The paper has a KL penalty of β = 0.01 (0.001 for
    search), which needs a reference policy and is 0 here; PPO's clip is our choice.

    Reads rewards (`*batch G S`), state_ids; of a Batch nothing beyond its first four fields.

    Args:
        gamma: discount per step of G.
        weight: ω, of the step's advantage.
        scale: "group" divides by std + ε, "none" does not.
        eps: added to the standard deviation.
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
        Feng et al. (GiGPO), arXiv 2505.10978, equations 3 and 5 to 9, appendix E.1 (γ, ω).

    >>> print(gigpo().advantage.explain())
    (R − mean of the group)/(std + 1e-06) + 1 (G − mean of the state)/(std + 1e-06), Gₜ = rₜ + 0.95 Gₜ₊₁

    """
    return assemble(
        "gigpo",
        StepGroups(float(gamma), float(weight), scale, float(eps)),
        Clip(float(clip_low), float(clip_high), optional(dual_clip)),
        "seq-mean-token-mean",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
    )
