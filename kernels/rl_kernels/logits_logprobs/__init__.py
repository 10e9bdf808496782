"""Log-probability of given tokens, entropy and logsumexp from logits."""

from rl_kernels.logits_logprobs.api import TokenLogprobs, logits_logprobs

__all__ = ["TokenLogprobs", "logits_logprobs"]
