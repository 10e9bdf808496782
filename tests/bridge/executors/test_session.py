"""init and current_executor."""

import logging
import subprocess
import sys

import pytest

import rl_bridge
from rl_bridge import session
from rl_bridge.executors import LocalExecutor


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No executor before and none after; not in a torchrun job."""
    monkeypatch.setattr(session, "_current", [])
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    level = logging.getLogger("rl_bridge").level
    yield
    logging.getLogger("rl_bridge").setLevel(level)


def test_the_default_is_local_and_made_once():
    executor = rl_bridge.current_executor()
    assert isinstance(executor, LocalExecutor)
    assert rl_bridge.current_executor() is executor
    executor.stop()
    assert rl_bridge.current_executor() is not executor


def test_init_makes_the_current_executor():
    executor = rl_bridge.init("local", workers=1, log_level="INFO")
    assert rl_bridge.current_executor() is executor
    assert logging.getLogger("rl_bridge").level == logging.INFO
    assert rl_bridge.init() is not executor  # nothing lived in it


def test_an_executor_that_engines_live_in_is_not_replaced():
    rl_bridge.init().held[0] = ["policy"]
    with pytest.raises(ValueError, match=r"executor 'local' is in use; call its stop\(\)"):
        rl_bridge.init()
    rl_bridge.current_executor().stop()
    rl_bridge.init()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "slurm"}, r"no executor 'slurm'; there are 'local', 'torchrun' and 'ray'"),
        ({"workers": 2}, r"workers=2 was asked for, and executor 'local' has 1"),
        ({"slots": [{"GPU": 1}]}, r"slots=\[\{'GPU': 1\}\] is for executor 'ray'"),
        ({"address": "auto"}, r"address='auto' is for executor 'ray'"),
        ({"restarts": 1}, r"restarts=1 is for executor 'ray'"),
        ({"debug": "gdb"}, r"debug='gdb'; there are 'pdb' and 'debugpy'"),
        ({"executor": "torchrun"}, r"torchrun --nproc_per_node=N script\.py"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rl_bridge.init(**options)
    assert not session._current


def test_importing_rl_bridge_loads_neither_torch_nor_ray():
    code = "import sys, rl_bridge; assert not {'torch', 'ray', 'peft', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys, rl_bridge; rl_bridge.init(); assert not {'ray', 'peft', 'vllm', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_another_name_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'engines_'"):
        rl_bridge.engines_  # noqa: B018
