"""The k most probable tokens a row and their log-probabilities, from logits or straight from hidden states."""

from rl_kernels.topk_logprobs.api import TopkLogprobs, linear_topk_logprobs, topk_logprobs

__all__ = ["TopkLogprobs", "linear_topk_logprobs", "topk_logprobs"]
