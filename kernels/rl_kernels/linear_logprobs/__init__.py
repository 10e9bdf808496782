"""Log-probability of given tokens, entropy and logsumexp straight from hidden states; the logits are never whole."""

from rl_kernels.linear_logprobs.api import linear_logprobs

__all__ = ["linear_logprobs"]
