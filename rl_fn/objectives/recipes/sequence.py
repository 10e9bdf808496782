"""One ratio for the whole answer: GSPO and its descendants, VESPO."""

from rl_fn._numerics import Number
from rl_fn.objectives.components import GMPO, GSPO, LUSPO, VESPO, GroupNormalised, GSPOToken
from rl_fn.objectives.objective import Objective
from rl_fn.objectives.recipes.common import assemble, optional


def gspo(
    *,
    eps: Number = 1e-6,
    clip_low: Number = 3e-4,
    clip_high: Number = 4e-4,
    dual_clip: Number | None = None,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """GSPO: GRPO's advantage with one length-normalised ratio for the whole answer.

    seq-mean-token-mean of −min(sA, clip(s, 1 − ε_low, 1 + ε_high)A),  s = exp(mean log ρ),  A = (r − mean)/(std + ε)

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
        Zheng et al. (GSPO), arXiv 2507.18071, equations 5 and 7, section 5.1 (clips).

    >>> print(gspo().loss.explain())
    −min(sA, clip(s, 1 − 0.0003, 1 + 0.0004)A), s = exp(mean of log ρ)

    """
    return assemble(
        "gspo",
        GroupNormalised("group", float(eps)),
        GSPO(float(clip_low), float(clip_high), optional(dual_clip)),
        "seq-mean-token-mean",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
    )


def gspo_token(
    *,
    eps: Number = 1e-6,
    clip_low: Number = 3e-4,
    clip_high: Number = 4e-4,
    dual_clip: Number | None = None,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """GSPO-token: GSPO's ratio with a gradient for each token, for advantages that differ inside an answer.

    seq-mean-token-mean of −min(sA, clip(s, 1 − ε_low, 1 + ε_high)A),  s = sg(exp(mean log ρ)) π/sg(π),  A = (r −
    mean)/(std + ε)

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
        Zheng et al. (GSPO), arXiv 2507.18071, equations 13 and 14, section 5.1 (clips, GSPO's).

    >>> print(gspo_token().loss.explain())
    −min(sA, clip(s, 1 − 0.0003, 1 + 0.0004)A), s = sg(exp(mean of log ρ)) π/sg(π)

    """
    return assemble(
        "gspo_token",
        GroupNormalised("group", float(eps)),
        GSPOToken(float(clip_low), float(clip_high), optional(dual_clip)),
        "seq-mean-token-mean",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
    )


def luspo(
    *,
    eps: Number = 1e-6,
    clip_low: Number = 2e-3,
    clip_high: Number = 2.5e-3,
    dual_clip: Number | None = None,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """LUSPO: GSPO whose answers weigh by their length, so that long ones are not held back.

    seq-mean-token-mean of −|y| min(sA, clip(s, 1 − ε_low, 1 + ε_high)A),  s = exp(mean log ρ),  A = (r − mean)/(std +
    ε)

    The clips are the paper's, wider than GSPO's.

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
        Liu et al. (LUSPO), arXiv 2602.05261, equation 7, section 5.1 (clips).

    >>> print(luspo().loss.explain())
    |y| · (−min(sA, clip(s, 1 − 0.002, 1 + 0.0025)A)), s = exp(mean of log ρ)

    """
    return assemble(
        "luspo",
        GroupNormalised("group", float(eps)),
        LUSPO(float(clip_low), float(clip_high), optional(dual_clip)),
        "seq-mean-token-mean",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
    )


def gmpo(
    *,
    eps: Number = 1e-6,
    clip_low: Number = 0.4,
    clip_high: Number = 0.4,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """GMPO: the geometric mean of an answer's ratios, each clipped first.

    seq-mean-token-mean of −A exp(mean x),  x = log ρ clipped to ≤ ε_high where A > 0, ≥ −ε_low where A < 0

    Reads rewards (`*batch G`); of a Batch nothing beyond its first four fields.

    Args:
        eps: added to the standard deviation.
        clip_low: ε_low, nats.
        clip_high: ε_high, nats.
        kl_coef: β of a KL penalty in the loss; 0 needs no ref_logprobs.
        kl_estimator: "k1", "k2", "k3", "abs", "k1+" or "k3+".
        entropy_coef: coefficient of the entropy bonus; 0 needs no entropies.
        correction_cap: cap of truncated importance weights against rollout_logprobs; None for no correction.

    Returns:
        Objective.

    Raises:
        ValueError: for constants that a piece refuses.

    Reference:
        Zhao et al. (GMPO), arXiv 2507.20673, equation 4, section 3 (clips).

    >>> print(gmpo().loss.explain())
    −A exp(mean of x), x = min(log ρ, 0.4) where A > 0, max(log ρ, −0.4) where A < 0

    """
    return assemble(
        "gmpo",
        GroupNormalised("group", float(eps)),
        GMPO(float(clip_low), float(clip_high)),
        "seq-mean-token-mean",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
    )


def vespo(
    *,
    eps: Number = 1e-6,
    k_pos: Number = 2.0,
    lambda_pos: Number = 3.0,
    k_neg: Number = 3.0,
    lambda_neg: Number = 2.0,
    behaviour: str = "rollout",
    kl_coef: Number = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: Number = 0.0,
) -> Objective:
    """VESPO: off-policy REINFORCE weighted by a smooth bump in the answer's importance weight.

    token-mean of −sg(e^λ wᵏ e^(−λw)) A log π,  w = Π π/μ over the answer,  A = (r − mean)/(std + ε)

    (k, λ) are the paper's, whose A = r − mean; the std and the aggregation are TRL's. With behaviour "rollout" the
    weight is the correction: a second one is refused.

    Reads rewards (`*batch G`); of a Batch rollout_logprobs too.

    Args:
        eps: added to the standard deviation.
        k_pos: k where A ≥ 0.
        lambda_pos: λ where A ≥ 0.
        k_neg: k where A < 0.
        lambda_neg: λ where A < 0.
        behaviour: policy under the ratio: "rollout" (μ, rollout_logprobs) or "old" (π_old).
        kl_coef: β of a KL penalty in the loss; 0 needs no ref_logprobs.
        kl_estimator: "k1", "k2", "k3", "abs", "k1+" or "k3+".
        entropy_coef: coefficient of the entropy bonus; 0 needs no entropies.

    Returns:
        Objective.

    Raises:
        ValueError: for constants that a piece refuses.

    Reference:
        Shen et al. (VESPO), arXiv 2602.10693, equation 20 of its version 3, section 4.1 (k, λ).

    >>> print(vespo().loss.explain())
    −sg(e^λ wᵏ e^(−λw)) A log π, (k, λ) = (2, 3) where A ≥ 0, else (3, 2), w = exp(Σ logprobs − rollout_logprobs)

    """
    return assemble(
        "vespo",
        GroupNormalised("group", float(eps)),
        VESPO(float(k_pos), float(lambda_pos), float(k_neg), float(lambda_neg), behaviour=behaviour),
        "token-mean",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
    )
