"""One ratio for the whole completion: GSPO and its descendants, VESPO."""

from rl_fn._numerics import Number
from rl_fn.objectives.components import GMPO, GSPO, LUSPO, VESPO, Aggregation, GRPOAdvantage, GSPOToken
from rl_fn.objectives.objective import Objective


def gspo(*, eps: Number = 1e-6, clip_low: Number = 3e-4, clip_high: Number = 4e-4) -> Objective:
    """GSPO: GRPO's advantage with one length-normalised ratio for the whole completion.

    seq-mean-token-mean of −min(sA, clip(s, 1 − ε_low, 1 + ε_high)A),  s = exp(mean log ρ),  A = (r − mean)/(std + ε)

    Args:
        eps: added to the standard deviation.
        clip_low: ε_low.
        clip_high: ε_high.

    Reference:
        Zheng et al. (GSPO), arXiv 2507.18071, equations 5 and 7, section 5.1 (clips).

    >>> print(gspo().loss.explain())
    −min(sA, clip(s, 1 − 0.0003, 1 + 0.0004)A), s = exp(mean of log ρ)

    """
    return Objective("gspo", GRPOAdvantage("group", eps), GSPO(clip_low, clip_high), Aggregation("seq-mean-token-mean"))


def gspo_token(*, eps: Number = 1e-6, clip_low: Number = 3e-4, clip_high: Number = 4e-4) -> Objective:
    """GSPO-token: GSPO's ratio with a gradient for each token, for advantages that differ inside a completion.

    seq-mean-token-mean of −min(sA, clip(s, 1 − ε_low, 1 + ε_high)A),  s = sg(exp(mean log ρ)) π/sg(π),  A = (r −
    mean)/(std + ε)

    Args:
        eps: added to the standard deviation.
        clip_low: ε_low.
        clip_high: ε_high.

    Reference:
        Zheng et al. (GSPO), arXiv 2507.18071, equations 13 and 14, section 5.1 (clips, GSPO's).

    >>> print(gspo_token().loss.explain())
    −min(sA, clip(s, 1 − 0.0003, 1 + 0.0004)A), s = sg(exp(mean of log ρ)) π/sg(π)

    """
    return Objective(
        "gspo_token", GRPOAdvantage("group", eps), GSPOToken(clip_low, clip_high), Aggregation("seq-mean-token-mean")
    )


def luspo(*, eps: Number = 1e-6, clip_low: Number = 2e-3, clip_high: Number = 2.5e-3) -> Objective:
    """LUSPO: GSPO whose completions weigh by their length, so that long ones are not held back.

    seq-mean-token-mean of −|y| min(sA, clip(s, 1 − ε_low, 1 + ε_high)A),  s = exp(mean log ρ),  A = (r − mean)/(std +
    ε)

    The clips are the paper's, wider than GSPO's.

    Args:
        eps: added to the standard deviation.
        clip_low: ε_low.
        clip_high: ε_high.

    Reference:
        Liu et al. (LUSPO), arXiv 2602.05261, equation 7, section 5.1 (clips).

    >>> print(luspo().loss.explain())
    |y| · (−min(sA, clip(s, 1 − 0.002, 1 + 0.0025)A)), s = exp(mean of log ρ)

    """
    return Objective(
        "luspo", GRPOAdvantage("group", eps), LUSPO(clip_low, clip_high), Aggregation("seq-mean-token-mean")
    )


def gmpo(*, eps: Number = 1e-6, clip_low: Number = 0.4, clip_high: Number = 0.4) -> Objective:
    """GMPO: the geometric mean of a completion's ratios, each clipped first.

    seq-mean-token-mean of −A exp(mean x),  x = log ρ clipped to ≤ ε_high where A > 0, ≥ −ε_low where A < 0

    Args:
        eps: added to the standard deviation.
        clip_low: ε_low, nats.
        clip_high: ε_high, nats.

    Reference:
        Zhao et al. (GMPO), arXiv 2507.20673, equation 4, section 3 (clips).

    >>> print(gmpo().loss.explain())
    −A exp(mean of x), x = min(log ρ, 0.4) where A > 0, max(log ρ, −0.4) where A < 0

    """
    return Objective("gmpo", GRPOAdvantage("group", eps), GMPO(clip_low, clip_high), Aggregation("seq-mean-token-mean"))


def vespo(
    *,
    eps: Number = 1e-6,
    k_pos: Number = 2.0,
    lambda_pos: Number = 3.0,
    k_neg: Number = 3.0,
    lambda_neg: Number = 2.0,
    behaviour: str = "rollout",
) -> Objective:
    """VESPO: off-policy REINFORCE weighted by a smooth bump in the completion's importance weight.

    token-mean of −sg(e^λ wᵏ e^(−λw)) A log π,  w = Π π/μ over the completion,  A = (r − mean)/(std + ε)

    (k, λ) are the paper's, whose A = r − mean; the std and the aggregation are TRL's. With behaviour "rollout" the
    weight is the correction: a second one is refused.

    Args:
        eps: added to the standard deviation.
        k_pos: k where A ≥ 0.
        lambda_pos: λ where A ≥ 0.
        k_neg: k where A < 0.
        lambda_neg: λ where A < 0.
        behaviour: policy under the ratio: "rollout" (μ, rollout_logprobs) or "old" (π_old).

    Reference:
        Shen et al. (VESPO), arXiv 2602.10693, equation 20 of its version 3, section 4.1 (k, λ).

    >>> print(vespo().loss.explain())
    −sg(e^λ wᵏ e^(−λw)) A log π, (k, λ) = (2, 3) where A ≥ 0, else (3, 2), w = exp(Σ logprobs − rollout_logprobs)

    """
    return Objective(
        "vespo",
        GRPOAdvantage("group", eps),
        VESPO(k_pos, lambda_pos, k_neg, lambda_neg, behaviour=behaviour),
        Aggregation("token-mean"),
    )
