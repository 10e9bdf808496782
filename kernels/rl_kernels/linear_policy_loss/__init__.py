"""A loss of log-probabilities straight from hidden states; fused, the logits are computed once instead of twice."""

from rl_kernels.linear_policy_loss.api import linear_policy_loss

__all__ = ["linear_policy_loss"]
