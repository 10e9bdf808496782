"""One token a row from truncated logits, with the log-probability under what it was drawn from."""

from rl_kernels.sampling.api import SampledTokens, sample
from rl_kernels.sampling.cutoff import Workspace

__all__ = ["SampledTokens", "Workspace", "sample"]
