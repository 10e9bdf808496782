"""Every public function with valid arguments: one table that the laws, the oracle parity and the bridge's parity read.

The cases of a family are in tests/rl_fn/cases/FAMILY.py; every module there is read.
"""

import importlib
from pathlib import Path

import rl_fn
from tests.rl_fn.cases.base import CASES, B, Case, Draw, G, T, V

__all__ = ["CASES", "RECIPES", "B", "Case", "Draw", "G", "T", "V"]

for _file in sorted(Path(__file__).with_name("cases").glob("*.py")):
    importlib.import_module(f"tests.rl_fn.cases.{_file.stem}")

# These return an Objective, not arrays: tested in test_objectives.py.
RECIPES = tuple(name for name in rl_fn.__all__ if getattr(rl_fn, name).__module__ == "rl_fn.recipes")
