"""A run whose worker fails ends in time, says why, and leaves no process behind."""

import importlib.util
import json

import pytest

from experiments.benchmarks.executor_failures import CAUSES, RAY_ONLY, job

pytestmark = pytest.mark.long

QUICK = ("killed", "hangs")
WITH_RAY = [pytest.mark.ray, pytest.mark.timeout(300)] if importlib.util.find_spec("ray") else None


def drills():
    for name in CAUSES:
        if name not in RAY_ONLY:
            yield pytest.param("torchrun", name, marks=[] if name in QUICK else pytest.mark.slow)
        if WITH_RAY:
            yield pytest.param("ray", name, marks=WITH_RAY)


@pytest.mark.parametrize(("kind", "drill"), list(drills()))
def test_a_failed_run_ends_with_its_cause_and_leaves_no_process(kind, drill):
    found = job(drill, kind)
    assert found["passed"], json.dumps(found, indent=1).replace("\\n", "\n")
