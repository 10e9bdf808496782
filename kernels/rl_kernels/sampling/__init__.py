"""One token a row from truncated logits, with the log-probability under what it was drawn from."""

from rl_kernels.sampling.api import SampledTokens, sample

__all__ = ["SampledTokens", "sample"]
