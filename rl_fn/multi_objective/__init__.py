"""Several objectives: one number from many, Pareto fronts, hypervolume."""

from rl_fn.multi_objective.archive import ArchiveState, ParetoArchive, pareto_archive
from rl_fn.multi_objective.hypervolume import hypervolume, hypervolume_contribution
from rl_fn.multi_objective.pareto import crowding_distance, pareto_mask
from rl_fn.multi_objective.scalarise import tchebycheff, weighted_sum

__all__ = [
    "ArchiveState",
    "ParetoArchive",
    "crowding_distance",
    "hypervolume",
    "hypervolume_contribution",
    "pareto_archive",
    "pareto_mask",
    "tchebycheff",
    "weighted_sum",
]
