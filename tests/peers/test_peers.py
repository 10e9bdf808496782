"""rl_fn against the installed libraries, option by option: run in .venv-peers (make peers), skipped elsewhere."""

import importlib

import jax
import pytest

from rl_tools.check.cases import LIBRARIES, MODULES, Absent, compare, version


def _is_there(library: str) -> bool:
    try:
        version(library)
    except Absent:
        return False
    return True


CASES = [
    pytest.param(library, case, id=f"{library} {case.name}")
    for library in LIBRARIES
    if _is_there(library)
    for module in MODULES[library]
    for case in importlib.import_module(f"rl_tools.check.{module}").cases()
]


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(not CASES, reason="no other library is installed: make peers")
@pytest.mark.parametrize(("library", "case"), CASES)
def test_agrees(library, case):
    # The project's strict promotion is for its own code, not for a library's.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        row = compare(library, case)
    assert row.agrees, row


@pytest.mark.peers
@pytest.mark.skipif(not _is_there("trl"), reason="trl is not installed: make peers")
def test_the_defaults_of_trl_are_those_of_its_config():
    """The dataclass's own, before its checks of the hardware."""
    import dataclasses

    from rl_fn.objectives.dialects.trl import DEFAULTS

    config = importlib.import_module("trl.trainer.grpo_config").GRPOConfig
    theirs = {field.name: field.default for field in dataclasses.fields(config)}
    assert {name: theirs[name] for name in DEFAULTS} == DEFAULTS
