"""Environments in processes of their own: the same conversations, and whatever loops, dies or hangs is ended alone."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from rl_bridge.data.trajectory import Budget, Request, RowRequest, SamplingParams, Spending
from rl_bridge.environments import load_environment
from rl_bridge.environments.environment import Session
from rl_bridge.environments.environment_calls import EnvironmentProcesses, ForkedSession, ThreadedSteps
from rl_bridge.models.model_source import StateSource
from rl_bridge.models.small import character_tokenizer
from rl_bridge.models.turn_template import TurnTemplate
from rl_bridge.rewards import RewardError, load
from rl_bridge.rollout import InProcessRollout
from rl_bridge.rollout.conversations import Conversations, Limits, Opening
from tests.support.processes import gone
from tests.support.simulated_sampler import SimulatedSampler

pytestmark = pytest.mark.long

TOKENIZER = character_tokenizer("0123456789+-=?")
LIMIT = 1.5
GAME = """
import os, pathlib, random, subprocess, sys, time
from rl_bridge.environments import Step

PIDS = pathlib.Path(__file__).parent / "pids"
loaded_in = os.getpid()

class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")

class Game:
    tools = ({"name": "add"},)

    def reset(self, row):
        self.act, self.total = row.get("act"), 0
        self.note(os.getpid())
        if self.act == "loop in reset":
            while True:
                pass
        return [{"role": "user", "content": row["prompt"]}]

    def note(self, pid):
        with PIDS.open("a") as file:
            file.write(f"{pid} {loaded_in}\\n")

    def step(self, messages):
        if self.act == "loop":
            self.note(subprocess.Popen(["sleep", "1000"]).pid)
            while True:
                pass
        if self.act == "exit":
            sys.exit(3)
        if self.act == "_exit":
            os._exit(3)
        if self.act == "odd":
            raise Odd(1, 2)
        if self.act == "unpicklable":
            return lambda: None
        self.total += len(messages)
        return Step(messages=[{"role": "tool", "content": f"={self.total}"}], reward=1.0, done=self.total > 4)

    def close(self):
        if self.act == "close":
            raise OSError("busy")

class Slow(Game):
    async def step(self, messages):
        return super().step(messages)

def random_number():
    class Random(Game):
        def step(self, messages):
            return Step(messages=[{"role": "tool", "content": str(random.random())[2:9]}])
    return Random()

def reward(completion, row):
    while True:
        pass
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("processes") / "mine.py"
    path.write_text(GAME)
    return path


@pytest.fixture(scope="module")
def processes(file):
    made = EnvironmentProcesses(load_environment(f"{file}:Game"), limit=LIMIT)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def only_loops_reach_the_limit(monkeypatch):
    """All other calls have a minute, so that nothing here depends on how busy the machine is."""

    def reset(self, row, reset=ForkedSession.reset):
        limit = self._limit
        self._limit = limit if row.get("act") == "loop in reset" else 60.0
        try:
            return reset(self, row)
        finally:
            self._limit = limit if row.get("act") == "loop" else 60.0

    monkeypatch.setattr(ForkedSession, "reset", reset)


def test_a_busy_machine_may_take_its_time_to_begin_a_process(file):
    """The limit is of the environment's calls: nothing of a process that has not begun is the environment's."""
    made = EnvironmentProcesses(load_environment(f"{file}:Game"), limit=3.0)
    os.kill(made._process.pid, signal.SIGSTOP)
    resumed = threading.Timer(4.0, os.kill, (made._process.pid, signal.SIGCONT))
    resumed.start()
    try:
        session = made.session()
        assert session.reset({"prompt": "1+1="}).messages == [{"role": "user", "content": "1+1="}]
        session.closing()
    finally:
        resumed.join()
        made.close()


@pytest.fixture
def pids(file):
    """Of the environments of this test, and where they were loaded."""
    (file.parent / "pids").unlink(missing_ok=True)

    def noted():
        return [tuple(map(int, line.split())) for line in (file.parent / "pids").read_text().splitlines()]

    return noted


def converse(make, acts, together=None, budget=None):
    openings = [
        (Opening(request_id=(0, i), seed=i, row={"prompt": "1+1=", "act": act, "_where": f"row {i}"}), make())
        for i, act in enumerate(acts)
    ]
    sampler = SimulatedSampler(range(2, 11), TOKENIZER.eos_token_id, stop=0.9)
    with ThreadedSteps(limit=30) as steps:
        limits = Limits(max_turns=3, turn_tokens=20)
        talks = Conversations(
            sampler, steps, TurnTemplate(TOKENIZER), limits, together=together, spending=budget and Spending(budget)
        )
        return talks.run(openings)


def test_the_conversations_are_those_of_threads(processes, file, pids):
    wanted = converse(lambda: Session(load_environment(f"{file}:Game")), [None] * 8)
    assert {where for pid, where in pids()} == {os.getpid()} and {t.turns for t in wanted} >= {2}
    (file.parent / "pids").unlink()
    assert converse(processes.session, [None] * 8, together=3) == wanted
    found, template = {pid for pid, _ in pids()}, {where for _, where in pids()}
    assert len(found) == 8 and len(template) == 1 and not template & {os.getpid(), *found}
    assert all(gone(pid) for pid in found) and not gone(*template, seconds=0.05)


@pytest.mark.parametrize(
    "act, said",
    [
        ("loop", "row 1, turn 1: TimeoutError: took longer than 1.5 s, and its process was ended"),
        ("loop in reset", "row 1, turn 0: TimeoutError: took longer than 1.5 s, and its process was ended"),
        ("exit", "row 1, turn 1: SystemExit: 3"),
        ("_exit", "row 1, turn 1: RuntimeError: the environment ended its process in step()"),
        ("odd", "row 1, turn 1: RuntimeError: Odd: 1 and 2"),
        ("unpicklable", "row 1, turn 1: TypeError: step() returned <function Game.step"),
        ("close", "closing an environment failed: OSError: busy"),
    ],
)
def test_what_goes_wrong_is_one_conversation_s(processes, file, pids, act, said, caplog):
    wanted = converse(lambda: Session(load_environment(f"{file}:Game")), [None] * 3)
    (file.parent / "pids").unlink()
    found = converse(processes.session, [None, act, None])
    assert [found[0], found[2]] == [wanted[0], wanted[2]]
    assert found[1].finish_reason == ("error" if act != "close" else wanted[1].finish_reason)
    (record,) = caplog.records
    assert said in record.getMessage()
    assert all(gone(pid) for pid, _ in pids()), "and what the environment started has ended with it"


def test_an_environment_that_loops_is_ended_at_the_call_s_limit(processes, pids):
    found = converse(processes.session, [None, "loop", None], budget=Budget(seconds=0.5))
    assert [t.finish_reason == "abort" for t in found] == [False, True, False]
    for pid, _ in pids():
        assert gone(pid)


def test_an_environment_that_loops_ends_with_a_driver_that_is_killed(file, pids):
    code = f"""
from rl_bridge.environments import load_environment
from rl_bridge.environments.environment_calls import EnvironmentProcesses, ForkedSession

if __name__ == "__main__":
    made = EnvironmentProcesses(load_environment("{file}:Game"), limit=600)
    made.session().reset({{"prompt": "1+1=", "act": "loop in reset"}})
"""
    driver = subprocess.Popen([sys.executable, "-c", code])
    noted, deadline = file.parent / "pids", time.monotonic() + 60
    while not (noted.exists() and noted.read_text().endswith("\n")) and time.monotonic() < deadline:
        assert driver.poll() is None
        time.sleep(0.02)
    ((environment, template),) = pids()
    driver.kill()
    driver.wait(10)
    try:
        assert gone(template) and gone(environment)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(environment, signal.SIGKILL)


def test_a_worker_s_conversations_and_its_next_ones(file, pids, new_model, tokenizer):
    model = new_model()
    rollout = InProcessRollout(StateSource(model.requires_grad_(False)), tokenizer)
    rollout._stop = frozenset(range(len(tokenizer)))  # each turn is one token
    requests = [RowRequest({"prompt": "1+1=", "act": act}, (0, i), i) for i, act in enumerate([None, "loop"])]
    options = {"step_timeout": LIMIT, "processes": 2}
    sampling = SamplingParams(max_new_tokens=4)
    templates = set()
    for name in ("Slow", "Slow"):  # asynchronous ones too; the factory is another object each time
        (one,), (two,) = rollout.converse(requests, sampling, load_environment(f"{file}:{name}"), 3, **options)
        assert (one.finish_reason, two.finish_reason) != ("error", "stop") and two.finish_reason == "error"
        assert one.turns > 1
        templates |= {where for _, where in pids() if where != os.getpid()}
    assert len(templates) == 1, "the process that took seconds to start is kept"
    rewards = load(f"{file}:reward", timeout=0.5)
    try:
        ((drawn,),) = rollout.generate([Request("1+1=", (0, 9))], sampling)
        for trajectory in (one, replace(drawn, row=one.row)):
            with pytest.raises(RewardError, match=r"reward reward on a row did not end within 0.5 s"):
                rewards.score([trajectory])
    finally:
        rewards.close()
    # The driver is gone, however it ended: nothing listens to a loop's connection.
    forked = rollout._processes
    session = forked.session()
    session._limit = 60.0  # this test's own, so that nothing but the end of the driver ends the loop
    thread = threading.Thread(target=lambda: ignoring(session.reset, {"prompt": "1", "act": "loop in reset"}))
    thread.start()
    while len(pids()) < 7:
        time.sleep(0.01)
    forked._control.close()
    assert gone(pids()[-1][0]) and gone(forked._process.pid)
    thread.join()


def ignoring(function, *arguments):
    with pytest.raises((TimeoutError, RuntimeError)):
        function(*arguments)


def test_forks_do_not_share_their_random_numbers(file):
    made = EnvironmentProcesses(load_environment(f"{file}:random_number"), limit=30)
    try:
        said = set()
        for _ in range(3):
            session = made.session()
            session.reset({"prompt": "1"})
            said.add(session.step([]).messages[0]["content"])
            session.closing()
        assert len(said) == 3
    finally:
        made.close()


def test_a_factory_that_cannot_travel_or_load_is_refused(file, tmp_path):
    with pytest.raises(ValueError, match=r"cannot be in a process of its own: .*name it FILE.py:Name"):
        EnvironmentProcesses(lambda: None, limit=1)
    factory = load_environment(f"{shutil.copy(file, tmp_path / 'lost.py')}:Game")
    (tmp_path / "lost.py").unlink()
    with pytest.raises(ValueError, match=r"cannot be loaded in a process of its own: no such environment file on"):
        EnvironmentProcesses(factory, limit=1)
