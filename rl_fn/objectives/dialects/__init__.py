"""What other libraries compute, as Objectives: the same word means different numbers in different libraries.

Each function takes a mapping of that library's own option names (docs/dialects.md says which version, and where the
numbers differ) and returns an Objective made with strict=False.
"""

from rl_fn.objectives.dialects.nemo_rl import nemo_rl
from rl_fn.objectives.dialects.openrlhf import openrlhf
from rl_fn.objectives.dialects.trl import trl
from rl_fn.objectives.dialects.tunix import tunix
from rl_fn.objectives.dialects.verl import verl

__all__ = ["nemo_rl", "openrlhf", "trl", "tunix", "verl"]
