"""Fast operations of vocabulary size. One folder an operation, one file a backend; neither triton nor jax is
imported before an operation needs it.
"""

from rl_kernels.int8_matmul import int8_matmul
from rl_kernels.linear_logprobs import linear_logprobs
from rl_kernels.linear_policy_loss import linear_policy_loss
from rl_kernels.logits_logprobs import TokenLogprobs, logits_logprobs
from rl_kernels.quantize import quantize_
from rl_kernels.sampling import SampledTokens, sample
from rl_kernels.topk_logprobs import TopkLogprobs, linear_topk_logprobs, topk_logprobs

__all__ = [
    "SampledTokens",
    "TokenLogprobs",
    "TopkLogprobs",
    "int8_matmul",
    "linear_logprobs",
    "linear_policy_loss",
    "linear_topk_logprobs",
    "logits_logprobs",
    "quantize_",
    "sample",
    "topk_logprobs",
]
