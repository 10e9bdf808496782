"""Objectives: an advantage, a loss and their terms, composed; recipes of published algorithms."""

from rl_fn.objectives import components, dialects, recipes
from rl_fn.objectives.batch import Batch, Rollouts
from rl_fn.objectives.objective import Objective

__all__ = ["Batch", "Objective", "Rollouts", "components", "dialects", "recipes"]
