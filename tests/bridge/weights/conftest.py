import pytest

from rl_bridge.executors import LocalExecutor
from tests.bridge.weights.engines import model
from tests.bridge.weights.one_process import put


@pytest.fixture
def executor():
    """A policy and a rollout of other weights, in one slot."""
    made = LocalExecutor("cpu")
    put(made, "policy", model(1))
    put(made, "rollout", model(2))
    return made
