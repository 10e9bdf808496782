"""The registry covers the library: a public function without a case, or a case without a function, fails here."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rl_fn
from tests.rl_fn.registry import CASES, CONSTRUCTORS, HOST


def _public_functions() -> set[str]:
    return {name for name in rl_fn.__all__ if inspect.isfunction(getattr(rl_fn, name))}


def test_every_public_function_has_a_case():
    assert {case.name for case in CASES.values()} | {*CONSTRUCTORS, *HOST} == _public_functions()


def test_functions_outside_the_table_are_called_in_a_test_of_their_own():
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in Path(__file__).parent.glob("test_*.py")]
    called = {
        node.func.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert {*CONSTRUCTORS, *HOST} - called == set()


def test_all_is_sorted_and_complete():
    assert list(rl_fn.__all__) == sorted(set(rl_fn.__all__), key=lambda s: (not s.isupper(), not s[0].isupper(), s))
    assert all(hasattr(rl_fn, name) for name in rl_fn.__all__)


@pytest.mark.parametrize("name", sorted(_public_functions()))
def test_docstring_has_all_its_parts(name):
    doc = inspect.getdoc(getattr(rl_fn, name))
    assert doc is not None
    wanted = ["Returns:", "Raises:", "Reference:", ">>> "]
    wanted += ["Args:"] if inspect.signature(getattr(rl_fn, name)).parameters else []
    assert [part for part in wanted if part not in doc] == []


@pytest.mark.parametrize("key", sorted(CASES))
def test_a_case_is_deterministic_and_keeps_its_shapes(key):
    (a, a_kwargs), (b, _), (other, _) = (CASES[key].make(seed) for seed in (1, 1, 2))
    for x, y, z in zip(a, b, other, strict=True):
        np.testing.assert_array_equal(x, y)
        assert np.shape(x) == np.shape(z)
    assert set(a_kwargs) == set(CASES[key].make(2)[1])


def test_import_is_light():
    script = "import sys, rl_fn; print([m for m in ('torch', 'chex', 'flax', 'triton') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"
