"""init and current_executor."""

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

import rl_bridge
from rl_bridge.executors import LocalExecutor, session


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No executor before and none after; not in a torchrun job."""
    monkeypatch.setattr(session, "_current", [])
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RL_BRIDGE_EXECUTOR", "RL_BRIDGE_WORKERS"):
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


PARTS = {
    "RANK=0 WORLD_SIZE=2": "MASTER_ADDR is not set, MASTER_PORT is not set",
    "RANK=0": "WORLD_SIZE is not set, MASTER_ADDR is not set, MASTER_PORT is not set",
    "WORLD_SIZE=1 MASTER_ADDR=here MASTER_PORT=29500": "RANK is not set",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=here": "MASTER_PORT is not set",
    "RANK=x WORLD_SIZE=2 MASTER_ADDR=here MASTER_PORT=29500": "RANK=x is no whole number of at least 0",
    "RANK=-1 WORLD_SIZE=2 MASTER_ADDR=here MASTER_PORT=29500": "RANK=-1 is no whole number of at least 0",
    "RANK=0 WORLD_SIZE=0 MASTER_ADDR=here MASTER_PORT=29500": "WORLD_SIZE=0 is no whole number of at least 1",
    "RANK=3 WORLD_SIZE=2 MASTER_ADDR=here MASTER_PORT=29500": "RANK=3 is none of the ranks 0 to 1 of WORLD_SIZE=2",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=here MASTER_PORT=99999": "MASTER_PORT=99999 is above 65535",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=here MASTER_PORT=x": "MASTER_PORT=x is no whole number of at least 1",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=here MASTER_PORT=1 LOCAL_WORLD_SIZE=a": "LOCAL_WORLD_SIZE=a is no whole number",
}


@pytest.mark.parametrize("words", PARTS)
def test_an_environment_of_half_a_rank_is_refused_with_what_is_wrong_usr_20(words, monkeypatch):
    for word in words.split():
        monkeypatch.setenv(*word.split("="))
    with pytest.raises(ValueError, match="start all ranks with `torchrun") as refused:
        rl_bridge.init()
    assert words in str(refused.value) and PARTS[words] in str(refused.value)
    assert rl_bridge.init("local").name == "local"


def test_an_address_alone_makes_no_rank(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert rl_bridge.current_executor().name == "local"


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
        ({"workers": 2}, r"2 workers were asked for .*, and executor 'local' has 1"),
        ({"slots": [{"GPU": 1}]}, r"slots=\[\{'GPU': 1\}\] is for executor 'ray'"),
        ({"address": "auto"}, r"address='auto' is for executor 'ray'"),
        ({"restarts": 1}, r"restarts=1 is for executor 'ray'"),
        ({"debug": "gdb"}, r"debug='gdb'; there is 'debugpy'"),
        ({"debug": "pdb"}, r"debug='pdb': a worker has no terminal; debug='debugpy' stops it"),
        ({"executor": "torchrun"}, r"torchrun --nproc_per_node=N script\.py"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rl_bridge.init(**options)
    assert not session._current


@pytest.mark.long
def test_importing_rl_bridge_loads_neither_torch_nor_ray():
    code = "import sys, rl_bridge; assert not {'torch', 'ray', 'peft', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys, rl_bridge; rl_bridge.init(); assert not {'ray', 'peft', 'vllm', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_another_name_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'engines_'"):
        rl_bridge.engines_  # noqa: B018


@pytest.mark.parametrize("options", [{}, {"start_timeout": 7.0}])
def test_how_long_a_start_may_take_is_the_user_s_to_say(monkeypatch, options):
    """ENG-22: it was 300 seconds, whoever asked."""
    made = []
    monkeypatch.setattr(session, "TorchrunExecutor", lambda **given: made.append(given) or LocalExecutor("cpu"))
    rl_bridge.init("torchrun", **options)
    assert made == [{"timeout": 1800.0, "start_timeout": options.get("start_timeout", 300.0), "debug": None}]


@pytest.fixture
def starts(monkeypatch):
    """What each executor of Ray was made with."""
    made = []

    def start(**options):
        made.append(
            {name: value for name, value in options.items() if value is not None and name in ("workers", "slots")}
        )
        return LocalExecutor("cpu")

    monkeypatch.setitem(sys.modules, "rl_bridge.executors.ray", SimpleNamespace(RayExecutor=start))
    return made


@pytest.mark.parametrize(
    ("environment", "options", "expected"),
    [
        ("RL_BRIDGE_EXECUTOR=ray", {}, {}),
        ("RL_BRIDGE_EXECUTOR=ray RL_BRIDGE_WORKERS=2", {}, {"workers": 2}),
        ("RL_BRIDGE_EXECUTOR=ray RL_BRIDGE_WORKERS=2", {"workers": 3}, {"workers": 3}),
        ("RL_BRIDGE_EXECUTOR=ray", {"slots": [{"GPU": 1}]}, {"slots": [{"GPU": 1}]}),
        ("RL_BRIDGE_WORKERS=2", {"executor": "ray"}, {}),
    ],
)
def test_a_script_goes_over_ray_by_the_environment_alone(environment, options, expected, starts, monkeypatch):
    for word in environment.split():
        monkeypatch.setenv(*word.split("="))
    rl_bridge.init(**options)
    assert starts == [expected]


def test_an_executor_that_the_script_names_is_not_the_environment_s(starts, monkeypatch):
    monkeypatch.setenv("RL_BRIDGE_EXECUTOR", "ray")
    assert rl_bridge.init("local").name == "local" and not starts
    rl_bridge.current_executor().stop()
    rl_bridge.current_executor()
    assert starts == [{}]


RANK = "RANK=0 WORLD_SIZE=2 MASTER_ADDR=here MASTER_PORT=29500"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            "RL_BRIDGE_EXECUTOR=slurm",
            "RL_BRIDGE_EXECUTOR=slurm is no executor; there are 'local', 'torchrun' and 'ray'",
        ),
        (f"{RANK} RL_BRIDGE_EXECUTOR=ray", "RL_BRIDGE_EXECUTOR=ray, and torchrun started this process"),
        (f"{RANK} RL_BRIDGE_EXECUTOR=local", "RL_BRIDGE_EXECUTOR=local, and torchrun started this process"),
        ("RL_BRIDGE_EXECUTOR=ray RL_BRIDGE_WORKERS=0", "RL_BRIDGE_WORKERS=0 is no whole number of at least 1"),
        ("RL_BRIDGE_EXECUTOR=ray RL_BRIDGE_WORKERS=two", "RL_BRIDGE_WORKERS=two is no whole number of at least 1"),
        ("RL_BRIDGE_WORKERS=2", "2 workers were asked for .*, and executor 'local' has 1"),
    ],
)
def test_an_environment_that_says_no_executor_is_refused(environment, message, starts, monkeypatch):
    for word in environment.split():
        monkeypatch.setenv(*word.split("="))
    with pytest.raises(ValueError, match=message):
        rl_bridge.init()
    assert not session._current and not starts
