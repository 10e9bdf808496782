"""Rewards of the best of several answers."""

from rl_fn._numerics import Number
from rl_fn.objectives.components import BestOfSets, BestOnly, Clip
from rl_fn.objectives.objective import Objective
from rl_fn.objectives.recipes.common import assemble, optional


def passk(
    *,
    k: int = 4,
    clip_low: Number = 0.2,
    clip_high: Number = 0.28,
    dual_clip: Number | None = None,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """Pass@k training: DAPO's loss on the analytic advantage of the best of k answers.

    token-mean of −min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)A),  A = (mean R of the sets of k with the answer − mean
    R)/(std of R)

    Clip-higher and the token-mean are DAPO's, as in the paper; k = 4 is our choice. A group needs at least k answers.

    Reads rewards (`*batch G`); of a Batch nothing beyond its first four fields.

    Args:
        k: answers in a set, from 1 to the group's size.
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
        ValueError: for constants that a piece refuses; advantages() for a group of fewer than k.

    Reference:
        Chen et al. (Pass@k Training), arXiv 2508.10751, section 2.1 and equations 11 to 15.

    >>> print(passk().advantage.explain())
    (mean R of the sets of 4 with the answer − mean R)/(std of R), R = the set's best r

    """
    return assemble(
        "passk",
        BestOfSets(k),
        Clip(float(clip_low), float(clip_high), optional(dual_clip)),
        "token-mean",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
    )


def grpo_passk(
    *,
    divide_by_std: bool = True,
    eps: Number = 1e-6,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    dual_clip: Number | None = None,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """GRPO on the best answer alone, by its lead over the second best (verl's grpo_passk).

    token-mean of −min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)A),  A = (r₁ − r₂)/(std + ε) for the best, else 0

    Reads rewards (`*batch G`); of a Batch nothing beyond its first four fields.

    Args:
        divide_by_std: divide by std + ε, or not.
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
        Tang et al., arXiv 2503.19595, for the lead of the best answer; the std, the clip and the mean are verl's.

    >>> print(grpo_passk().advantage.explain())
    (r₁ − r₂)/(std + 1e-06) for the group's best, else 0

    """
    return assemble(
        "grpo_passk",
        BestOnly(divide_by_std, float(eps)),
        Clip(float(clip_low), float(clip_high), optional(dual_clip)),
        "token-mean",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
    )
