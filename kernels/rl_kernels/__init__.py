"""Fast operations of vocabulary size. One folder an operation, one file a backend; neither triton nor jax is
imported before an operation needs it.
"""

from rl_kernels.logits_logprobs import logits_logprobs

__all__ = ["logits_logprobs"]
