"""Every public function with valid arguments: one table that the laws, the oracle parity and the bridge's parity read.

The cases of a family are in tests/rl_fn/cases/FAMILY.py; every module there is read.
"""

import importlib
from pathlib import Path

import rl_fn
from tests.rl_fn.cases.base import CASES, B, Case, Draw, G, T, V
from tests.rl_fn.machines import CONSTRUCTORS
from tests.rl_fn.permutations import PERMUTED

__all__ = ["CASES", "CONSTRUCTORS", "HOST", "RECIPES", "B", "Case", "Draw", "G", "T", "V"]

for _file in sorted(Path(__file__).with_name("cases").glob("*.py")):
    importlib.import_module(f"tests.rl_fn.cases.{_file.stem}")

# These return an Objective, not arrays: tested in test_objectives.py, test_recipes.py and test_compatibility.py.
RECIPES = tuple(rl_fn.recipes.__all__)
# These work on the host, NumPy in and out: their laws are in test_permutations.py, what else they do in test_packing.py
# and test_hypervolume.py. A function that is neither here nor a machine (machines.py) needs a case.
HOST = tuple(sorted(set(PERMUTED) - {case.name for case in CASES.values()}))
