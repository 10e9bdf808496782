"""Every public function with valid arguments: one table that the laws, the oracle parity and the bridge's parity read.

The cases of a family are in tests/rl_fn/cases/FAMILY.py; every module there is read.
"""

import importlib
import inspect
from pathlib import Path

import rl_fn
from tests.rl_fn.cases.base import CASES, B, Case, Draw, G, T, V

__all__ = ["CASES", "CONSTRUCTORS", "HOST", "RECIPES", "B", "Case", "Draw", "G", "T", "V"]

for _file in sorted(Path(__file__).with_name("cases").glob("*.py")):
    importlib.import_module(f"tests.rl_fn.cases.{_file.stem}")


def _functions_of(*modules: str) -> tuple[str, ...]:
    public = {name: getattr(rl_fn, name) for name in rl_fn.__all__}
    owners = tuple(f"rl_fn.{module}" for module in modules)
    return tuple(name for name, x in public.items() if inspect.isfunction(x) and x.__module__.startswith(owners))


# These return an Objective, not arrays: tested in test_objectives.py, test_recipes.py and test_combinations.py.
RECIPES = tuple(rl_fn.recipes.__all__)
# These return an init/update pair: tested in test_controllers.py, test_constraints.py and test_archive.py.
CONSTRUCTORS = _functions_of("control", "multi_objective.archive")
# These work on the host, NumPy in and out: tested in test_packing.py and test_hypervolume.py.
HOST = _functions_of("packing", "multi_objective.hypervolume")
