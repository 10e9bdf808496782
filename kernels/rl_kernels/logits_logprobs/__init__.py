"""Log-probability of given tokens, entropy and logsumexp from logits."""

from rl_kernels.logits_logprobs.operation import logits_logprobs

__all__ = ["logits_logprobs"]
