import pytest

from rl_bridge.executors import LocalExecutor
from tests.support.one_process import put
from tests.support.weight_engines import model


@pytest.fixture
def executor():
    """A policy and a rollout of other weights, in one slot."""
    made = LocalExecutor("cpu")
    put(made, "policy", model(1))
    put(made, "rollout", model(2))
    return made
