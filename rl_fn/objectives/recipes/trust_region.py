"""GRPO with another trust region than PPO's clip."""

from rl_fn._numerics import Number
from rl_fn.objectives.components import CISPO, DPPO, SAPO, Aggregation, ClipCov, GRPOAdvantage, KLCov
from rl_fn.objectives.objective import Objective


def cispo(*, eps: Number = 1e-6, clip_high: Number = 4.0, clip_low: Number | None = None) -> Objective:
    """CISPO: REINFORCE under a clipped importance weight, so that no token loses its gradient.

    token-mean of −sg(min(ρ, 1 + ε_high)) A log π,  A = (r − mean)/(std + ε)

    The paper gives no number for ε_high, which here is the offset from 1: 4, a cap of 5, is our choice.

    Args:
        eps: added to the standard deviation.
        clip_high: ε_high, the cap less 1.
        clip_low: ε_low; no lower bound in the paper.

    Reference:
        MiniMax (MiniMax-M1), arXiv 2506.13585, equations 4 and 5.

    >>> print(cispo().loss.explain())
    −sg(min(ρ, 1 + 4)) A log π

    """
    return Objective("cispo", GRPOAdvantage("group", eps), CISPO(clip_high, clip_low), Aggregation("token-mean"))


def sapo(*, eps: Number = 1e-6, tau_pos: Number = 1.0, tau_neg: Number = 1.05) -> Objective:
    """SAPO: a soft gate on each token's ratio in place of the clip.

    seq-mean-token-mean of −(4/τ) σ(τ(ρ − 1)) A,  τ = τ_pos where A > 0, else τ_neg,  A = (r − mean)/(std + ε)

    Args:
        eps: added to the standard deviation.
        tau_pos: τ_pos > 0.
        tau_neg: τ_neg > 0; larger fades faster.

    Reference:
        Gao et al. (SAPO), arXiv 2511.20347, equations 5 and 6 (τ = 1 and 1.05 in its experiments).

    >>> print(sapo().loss.explain())
    −(4/τ) σ(τ(ρ − 1)) A, τ = 1 where A > 0, else 1.05

    """
    return Objective("sapo", GRPOAdvantage("group", eps), SAPO(tau_pos, tau_neg), Aggregation("seq-mean-token-mean"))


def dppo(
    *, threshold: Number = 0.15, divergence: str = "tv", ratio_cap: Number | None = None, behaviour: str = "rollout"
) -> Objective:
    """DPPO: a trust region in the token's probability instead of its ratio.

    seq-mean-token-sum of −M r A,  M = 0 where D > δ and the update would raise it,  r = π/μ,  A = r − mean

    δ is the paper's: 0.15 for tv, 0.05 for kl. So are centred rewards and the sum over tokens. With behaviour
    "rollout" the ratio is the correction: a second one is refused.

    Args:
        threshold: δ > 0: a probability for tv, nats for kl.
        divergence: "tv" or "kl".
        ratio_cap: the ratio is held at this value; none by default.
        behaviour: policy under the ratio: "rollout" (μ, rollout_logprobs) or "old" (π_old).

    Reference:
        Qi et al. (DPPO), arXiv 2602.04879, equation 12 of its version 3, appendix C (δ).

    >>> print(dppo().loss.explain())
    −r A, 0 where the tv of the token's probability exceeds 0.15 and would grow, r = exp(logprobs − rollout_logprobs)

    """
    return Objective(
        "dppo",
        GRPOAdvantage("none"),
        DPPO(threshold, divergence, ratio_cap, behaviour=behaviour),
        Aggregation("seq-mean-token-sum"),
    )


def clip_cov(
    *,
    eps: Number = 1e-6,
    fraction: Number = 2e-4,
    cov_low: Number = 1.0,
    cov_high: Number = 5.0,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
) -> Objective:
    """Clip-Cov: PPO's clip without a few tokens of high covariance, which cost the most entropy.

    token-mean of −min(ρA, clip(ρ)A), 0 for a share of the tokens with cov_low < cov < cov_high,  A = (r − mean)/(std +
    ε)

    cov = (A − mean A)(log π − mean log π) over the batch passed in: micro-batches are such batches, and do not add up
    to the whole. With batch.noise the tokens are drawn at random as in the paper, without it the largest are taken.

    Args:
        eps: added to the standard deviation.
        fraction: of the counted tokens.
        cov_low: lower bound of the covariance.
        cov_high: upper bound of the covariance.
        clip_low: ε_low.
        clip_high: ε_high.

    Reference:
        Cui et al. (The Entropy Mechanism of RL), arXiv 2505.22617, equations 10 to 12, section 4.3 (fraction, bounds).

    >>> print(clip_cov().loss.explain())
    −min(ρA, clip(ρ, 1 − 0.2, 1 + 0.2)A), 0 for 0.0002 of the tokens, with 1 < cov(A, log π) < 5

    """
    return Objective(
        "clip_cov",
        GRPOAdvantage("group", eps),
        ClipCov(fraction, cov_low, cov_high, clip_low, clip_high),
        Aggregation("token-mean"),
    )


def kl_cov(*, eps: Number = 1e-6, fraction: Number = 2e-4, coef: Number = 1.0) -> Objective:
    """KL-Cov: no clip, and a KL penalty on the tokens of highest covariance.

    token-mean of −ρA, + β |log ρ| for the share of the tokens with the largest cov,  A = (r − mean)/(std + ε)

    cov = (A − mean A)(log π − mean log π) over the batch passed in: micro-batches do not add up to the whole.

    Args:
        eps: added to the standard deviation.
        fraction: of the counted tokens.
        coef: β.

    Reference:
        Cui et al. (The Entropy Mechanism of RL), arXiv 2505.22617, equations 10, 13 and 14, section 4.3 (share for 32B,
        β).

    >>> print(kl_cov().loss.explain())
    −ρA, + 1 |log ρ| for the 0.0002 of the tokens with the largest cov(A, log π)

    """
    return Objective("kl_cov", GRPOAdvantage("group", eps), KLCov(fraction, coef), Aggregation("token-mean"))
