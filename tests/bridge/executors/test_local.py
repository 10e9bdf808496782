"""The scenarios in this process, and what the local executor does in its own way."""

import pytest

from rl_bridge.executors import LocalExecutor
from tests.bridge.executors.call_scenarios import add, fail
from tests.bridge.executors.scenarios import IN_OTHER_PROCESSES, SCENARIOS


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in IN_OTHER_PROCESSES])
def test_every_scenario_in_this_process(name):
    SCENARIOS[name](LocalExecutor("cpu"))


def test_an_exception_is_the_function_s_own():
    error = KeyError("x")
    with pytest.raises(KeyError) as caught:
        LocalExecutor("cpu").call(fail, {0: (error,)}, what="step")
    assert caught.value is error


def test_a_stopped_executor_says_so():
    executor = LocalExecutor("cpu")
    executor.stop()
    with pytest.raises(ValueError, match=r"policy\.add: this executor has been stopped"):
        executor.call(add, {0: (1,)}, what="policy.add")


def test_restart_forgets_workers_and_who_holds_slots():
    executor = LocalExecutor("cpu")
    executor.call(lambda host: host.workers.update(policy=1), {0: ()}, what="build")
    executor.held[0] = ["policy"]
    executor.restart()
    assert executor.call(lambda host: dict(host.workers), {0: ()}, what="workers") == {0: {}}
    assert executor.held == {}


def test_a_call_from_inside_a_call_does_not_wait_for_itself():
    executor = LocalExecutor("cpu")
    outer = executor.submit(lambda host: executor.call(add, {0: (1,)}, what="inner"), {0: ()}, what="outer")
    assert outer.result(10) == {0: {0: (0, 1)}}
