import pytest

from rl_bridge.rollout.served.served_engine import ServedEngine
from tests.bridge.rollout.served.running import SERVED, opened


@pytest.fixture
def engine_of():
    made = []

    def make(folder, restarts=2, served=SERVED):
        made.append(ServedEngine(lambda place: opened(place, served), folder, at_once=8, restarts=restarts))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
