"""REINFORCE and its baselines: no ratio, one step a batch."""

from rl_fn._numerics import Number
from rl_fn.objectives.components import (
    Aggregation,
    GPGAdvantage,
    MaxRLAdvantage,
    OPOAdvantage,
    RawReward,
    Reinforce,
    ReMaxAdvantage,
    RLOOAdvantage,
)
from rl_fn.objectives.objective import Objective


def reinforce(*, baseline: Number = 0.0) -> Objective:
    """Plain REINFORCE on the reward of the whole completion.

    seq-mean-token-sum of −(r − b) log π

    Args:
        baseline: b, a constant.

    Reference:
        Williams, Simple Statistical Gradient-Following Algorithms (1992).

    >>> print(reinforce().explain())
    reinforce: minimise seq-mean-token-sum of ℓ
      ℓ = −A log π
      A = r − 0
      ρ = exp(logprobs − old_logprobs)

    """
    return Objective("reinforce", RawReward(baseline), Reinforce(), Aggregation("seq-mean-token-sum"))


def rloo() -> Objective:
    """RLOO: REINFORCE with the mean reward of the other completions as baseline; the paper's KL is in the reward.

    seq-mean-token-sum of −(r − mean of the others) log π

    The paper has a KL penalty in the reward, reward_kl=KL("k1", β); its β (0.03 or 0.1, by the data) is not a
    default.

    Raises:
        ValueError: by advantages() for a group of one, which has no others.

    Reference:
        Ahmadian et al., arXiv 2402.14740 (RLOO).

    >>> print(rloo().advantage.explain())
    r − mean of the others

    """
    return Objective("rloo", RLOOAdvantage(), Reinforce(), Aggregation("seq-mean-token-sum"))


def remax() -> Objective:
    """ReMax: REINFORCE with the reward of the greedy completion as baseline.

    seq-mean-token-sum of −(r − r(greedy)) log π

    Advantages come from advantages(Rollouts(rewards, mask, greedy_rewards=...)).

    Reference:
        Li et al. (ReMax), arXiv 2310.10505.

    >>> print(remax().advantage.explain())
    r − r(greedy)
    """
    return Objective("remax", ReMaxAdvantage(), Reinforce(), Aggregation("seq-mean-token-sum"))


def opo() -> Objective:
    """OPO: on-policy REINFORCE with the baseline that minimises the gradient's variance, if that grows with length.

    seq-mean-token-sum of −(r − Σ l r / Σ l) log π

    Exact only on policy: there is no ratio, and no KL or entropy term in the paper.

    Reference:
        Hao et al. (OPO), arXiv 2505.23585.

    >>> print(opo().advantage.explain())
    r − Σ l r / Σ l, l = tokens of the completion
    """
    return Objective("opo", OPOAdvantage(), Reinforce(), Aggregation("seq-mean-token-sum"))


def maxrl() -> Objective:
    """MaxRL: REINFORCE divided by the success rate, so that its gradient tends to the maximum-likelihood one.

    seq-mean-token-sum of −((r − mean)/mean) log π

    Rewards must not be negative (0 or 1 in the paper). The sum over a completion's tokens makes it the gradient of log
    p(completion).

    Reference:
        Tajwar et al. (MaxRL), arXiv 2602.02710, equation 10 and algorithm 1.

    >>> print(maxrl().advantage.explain())
    (r − mean)/mean, 0 where the mean is 0
    """
    return Objective("maxrl", MaxRLAdvantage(), Reinforce(), Aggregation("seq-mean-token-sum"))


def gpg(*, norm: Number = 1.0, alpha: str = "informative") -> Objective:
    """GPG: REINFORCE on centred rewards, scaled up for completions without a gradient; no ratio, no clip, no KL.

    token-mean of −α (r − mean)/F log π,  α = completions / informative completions

    Args:
        norm: F > 0.
        alpha: "informative", "nonzero" (verl) or "none", see gpg_advantages.

    Reference:
        Chu et al. (GPG), arXiv 2504.02546, equations 5 to 8 (F = 1 in its final form).

    >>> print(gpg().advantage.explain())
    α (r − mean)/1, α = completions / informative completions of the batch

    """
    return Objective("gpg", GPGAdvantage(norm, alpha), Reinforce(), Aggregation("token-mean"))
