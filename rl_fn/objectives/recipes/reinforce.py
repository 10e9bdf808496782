"""REINFORCE and its baselines: no ratio, one step a batch."""

from rl_fn._numerics import Number
from rl_fn.objectives.components import (
    GreedyBaseline,
    InformativeShare,
    LeaveOneOut,
    LengthWeighted,
    MeanNormalised,
    RawReward,
    Reinforce,
)
from rl_fn.objectives.objective import Objective
from rl_fn.objectives.recipes.common import assemble


def reinforce(
    *,
    baseline: Number = 0.0,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k2",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """Plain REINFORCE on the reward of the whole answer.

    seq-mean-token-sum of −(r − b) log π

    Reads rewards (`*batch G`); of a Batch nothing beyond its first four fields.

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

    >>> print(reinforce().explain())
    reinforce: minimise seq-mean-token-sum of ℓ
      ℓ = −A log π
      A = r − 0
      ρ = exp(logprobs − old_logprobs)

    """
    return assemble(
        "reinforce",
        RawReward(float(baseline)),
        Reinforce(),
        "seq-mean-token-sum",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
    )


def rloo(
    *,
    reward_kl_coef: Number = 0.0,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k2",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """REINFORCE with the mean reward of the other answers as baseline; the paper's KL penalty is part of the reward.

    seq-mean-token-sum of −(r − mean of the others) log π

    The paper has a KL penalty in the reward, reward_kl_coef here; its β (0.03 or 0.1, by the data) is not a default.

    Reads rewards (`*batch G`); of a Batch nothing beyond its first four fields.

    Args:
        reward_kl_coef: β of a k1 penalty in the rewards; 0 needs no ref_logprobs.
        kl_coef: β of a KL penalty in the loss; 0 needs no ref_logprobs.
        kl_estimator: "k1", "k2", "k3", "abs", "k1+" or "k3+".
        entropy_coef: coefficient of the entropy bonus; 0 needs no entropies.
        correction_cap: cap of truncated importance weights against rollout_logprobs; None for no correction.

    Returns:
        Objective.

    Raises:
        ValueError: for constants that a piece refuses; advantages() for a group of one, which has no others.

    Reference:
        Ahmadian et al., arXiv 2402.14740 (RLOO).

    >>> print(rloo().advantage.explain())
    r − mean of the others

    """
    return assemble(
        "rloo",
        LeaveOneOut(),
        Reinforce(),
        "seq-mean-token-sum",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
        reward_kl_coef=reward_kl_coef,
    )


def remax(
    *,
    reward_kl_coef: Number = 0.0,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k2",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """ReMax: REINFORCE with the reward of the greedy answer as baseline.

    seq-mean-token-sum of −(r − r(greedy)) log π

    Advantages come from advantages_of(Rollouts(rewards, mask, greedy_rewards=...)).

    Reads rewards (`*batch G`), greedy_rewards; of a Batch nothing beyond its first four fields.

    Args:
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
        Li et al. (ReMax), arXiv 2310.10505.

    >>> print(remax().advantage.explain())
    r − r(greedy)

    """
    return assemble(
        "remax",
        GreedyBaseline(),
        Reinforce(),
        "seq-mean-token-sum",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
        reward_kl_coef=reward_kl_coef,
    )


def opo(
    *,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k2",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """OPO: on-policy REINFORCE with the baseline that minimises the gradient's variance, if that grows with length.

    seq-mean-token-sum of −(r − Σ l r / Σ l) log π

    Exact only on policy: there is no ratio, and no KL or entropy term in the paper.

    Reads rewards (`*batch G`); of a Batch nothing beyond its first four fields.

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
        Hao et al. (OPO), arXiv 2505.23585.

    >>> print(opo().advantage.explain())
    r − Σ l r / Σ l, l = tokens of the answer

    """
    return assemble(
        "opo",
        LengthWeighted(),
        Reinforce(),
        "seq-mean-token-sum",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
    )


def maxrl(
    *,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k2",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """MaxRL: REINFORCE divided by the success rate, so that its gradient tends to the maximum-likelihood one.

    seq-mean-token-sum of −((r − mean)/mean) log π

    Rewards must not be negative (0 or 1 in the paper). The sum over an answer's tokens makes it the gradient of log
    p(answer).

    Reads rewards (`*batch G`); of a Batch nothing beyond its first four fields.

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
        Tajwar et al. (MaxRL), arXiv 2602.02710, equation 10 and algorithm 1.

    >>> print(maxrl().advantage.explain())
    (r − mean)/mean, 0 where the mean is 0

    """
    return assemble(
        "maxrl",
        MeanNormalised(),
        Reinforce(),
        "seq-mean-token-sum",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
    )


def gpg(
    *,
    norm: Number = 1.0,
    alpha: str = "informative",
    kl_coef: Number = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: Number = 0.0,
    correction_cap: Number | None = None,
) -> Objective:
    """GPG: REINFORCE on centred rewards, scaled up for the answers that carry no gradient; no ratio, no clip, no KL.

    token-mean of −α (r − mean)/F log π,  α = answers / informative answers

    Reads rewards (`*batch G`); of a Batch nothing beyond its first four fields.

    Args:
        norm: F > 0.
        alpha: "informative", "nonzero" (verl) or "none", see gpg_advantages.
        kl_coef: β of a KL penalty in the loss; 0 needs no ref_logprobs.
        kl_estimator: "k1", "k2", "k3", "abs", "k1+" or "k3+".
        entropy_coef: coefficient of the entropy bonus; 0 needs no entropies.
        correction_cap: cap of truncated importance weights against rollout_logprobs; None for no correction.

    Returns:
        Objective.

    Raises:
        ValueError: for constants that a piece refuses.

    Reference:
        Chu et al. (GPG), arXiv 2504.02546, equations 5 to 8 (F = 1 in its final form).

    >>> print(gpg().advantage.explain())
    α (r − mean)/1, α = answers / informative answers of the batch

    """
    return assemble(
        "gpg",
        InformativeShare(float(norm), alpha),
        Reinforce(),
        "token-mean",
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        correction_cap=correction_cap,
    )
