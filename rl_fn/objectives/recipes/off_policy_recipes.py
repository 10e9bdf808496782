"""Data of an older policy, and a teacher instead of rewards."""

from rl_fn._numerics import Number
from rl_fn.objectives.components import (
    DRO,
    TOPR,
    Aggregation,
    DistillationAdvantage,
    GRPOAdvantage,
    Kimi,
    M2POMask,
    RawReward,
    Reinforce,
    Surrogate,
)
from rl_fn.objectives.objective import Objective


def dro(*, beta: Number = 1.0, level: str = "sequence_sum") -> Objective:
    """DRO: REINFORCE with a quadratic pull to the policy that the data come from.

    seq-mean-token-sum of −(A log π − β/2 (Σ log ρ)²),  A = r − mean

    β is the paper's τ, 1 in its experiments with rewards of variance 1. The paper learns a value function, for which
    the group's mean stands in here, and its ratio is to a reference policy.

    Args:
        beta: β > 0, the paper's τ.
        level: of the square: "sequence_sum" as in the paper, or "token" as in trainers.

    Reference:
        Richemond et al. (DRO), arXiv 2405.19107, equation 8, section 4.1 (τ = 1).

    >>> print(dro().loss.explain())
    −(A log π − 1/2 (log ρ)²), log ρ per sequence_sum

    """
    return Objective("dro", GRPOAdvantage("none"), DRO(beta, level), Aggregation("seq-mean-token-sum"))


def kimi(*, tau: Number = 0.1, level: str = "sequence_sum") -> Objective:
    """Kimi k1.5's online mirror descent: REINFORCE on centred rewards with a quadratic pull to π_old.

    seq-mean-token-sum of −(A log π − τ/2 (Σ log ρ)²),  A = r − mean

    The paper gives no τ: 0.1 is our choice.

    Args:
        tau: τ > 0.
        level: of the square: "sequence_sum" as in the paper, or "token" as in trainers.

    Reference:
        Kimi Team (Kimi k1.5), arXiv 2501.12599, equation 3.

    >>> print(kimi().loss.explain())
    −(A log π − 0.1/2 (log ρ)²), log ρ per sequence_sum

    """
    return Objective("kimi", GRPOAdvantage("none"), Kimi(tau, level), Aggregation("seq-mean-token-sum"))


def topr(*, baseline: Number = 0.0, level: str = "sequence_sum", behaviour: str = "rollout") -> Objective:
    """TOPR: good completions as in supervised learning, bad ones by an importance weight that fades out.

    seq-mean-token-sum of −A log π where A ≥ 0, −sg(min(Π π/μ, 1)) A log π where A < 0,  A = r − b

    The sign of A decides: rewards are ±1, or have a baseline that makes bad completions negative. The paper's
    experiments divide by the completion's length, which its equation does not. With behaviour "rollout" the ratio
    is the correction: a second one is refused.

    Args:
        baseline: b, a constant.
        level: of the ratio: "sequence_sum" as in the paper, "token" or "sequence".
        behaviour: policy under the ratio: "rollout" (μ, rollout_logprobs) or "old" (π_old).

    Reference:
        Le Roux et al. (TOPR), arXiv 2503.14286, equation 8, section 4.2 (rewards of ±1, no baseline).

    >>> print(topr().loss.explain())
    −A log π where A ≥ 0, −sg(min(r, 1)) A log π where A < 0, r = exp(logprobs − rollout_logprobs) per sequence_sum

    """
    return Objective("topr", RawReward(baseline), TOPR(level, behaviour=behaviour), Aggregation("seq-mean-token-sum"))


def m2po(*, eps: Number = 1e-6, threshold: Number = 0.04) -> Objective:
    """M2PO: no clip; the tokens of largest (log ρ)² are dropped until the mean of the rest is within a bound.

    token-mean of −M ρ A,  M = 0 for the largest (log ρ)² until mean (log ρ)² ≤ τ,  A = (r − mean)/(std + ε)

    ρ is to old_logprobs, the paper's behaviour policy. The mean is over the batch passed in: micro-batches do not add
    up to the whole. Dropped tokens still count in the token-mean. All large ones are dropped, whatever the sign of A
    (AReaL's form).

    Args:
        eps: added to the standard deviation.
        threshold: τ > 0, nats².

    Reference:
        Zheng et al. (M2PO), arXiv 2510.01161, equation 5 and algorithm 1, section 5.2 (τ = 0.04).

    >>> m2po().correction
    M2POMask(threshold=0.04)

    """
    return Objective(
        "m2po", GRPOAdvantage("group", eps), Surrogate(), Aggregation("token-mean"), correction=M2POMask(threshold)
    )


def on_policy_distillation(*, clip: Number | None = None) -> Objective:
    """On-policy distillation: REINFORCE on the student's samples, the teacher's log-ratio being each token's advantage.

    token-mean of −A log π,  A = log π_T − log π_old

    No reward. Advantages come from advantages(Rollouts(None, mask, old_logprobs=..., teacher_logprobs=...)).

    Args:
        clip: bound of A; none by default.

    Reference:
        Lu & Thinking Machines Lab, "On-Policy Distillation" (2025).

    >>> print(on_policy_distillation().advantage.explain())
    teacher_logprobs − old_logprobs

    """
    return Objective("on_policy_distillation", DistillationAdvantage(clip), Reinforce(), Aggregation("token-mean"))
