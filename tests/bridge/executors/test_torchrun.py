"""The scenarios in real torchrun jobs of 1, 2 and 4 ranks."""

import json

import pytest

from tests.bridge.executors.jobs import run
from tests.bridge.executors.scenarios import SCENARIOS


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2, 4])
def test_every_scenario_under_torchrun(workers, tmp_path):
    result = tmp_path / "result.json"
    code, output, left = run(workers, "-m", "tests.bridge.executors.torchrun_suite", str(result))
    assert result.exists(), output
    outcomes = json.loads(result.read_text())
    assert (outcomes.pop("name"), outcomes.pop("slots")) == ("torchrun", workers)
    assert set(outcomes) == set(SCENARIOS)
    assert not (failed := {name: trouble for name, trouble in outcomes.items() if trouble}), "\n".join(failed.values())
    assert (code, left) == (0, []), output
