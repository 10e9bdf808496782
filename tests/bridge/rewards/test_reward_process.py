"""Rewards with a time limit: what hangs or dies in its own process is named and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

from rl_bridge.rewards import RewardError, load, reward_process
from rl_bridge.rewards.reward_process import AskedElsewhere
from tests.support.processes import gone
from tests.support.reward_batches import trajectories, values

FILE = """
import ctypes, os, pathlib, subprocess, sys, time
import helper

PIDS = pathlib.Path(__file__).parent / "pids"

def note(pid):
    with PIDS.open("a") as file:
        file.write(f"{pid}\\n")

def score(completion, row):
    note(os.getpid())
    if completion == "hang":
        note(subprocess.Popen(["sleep", "1000"]).pid)
        while True:
            pass
    if completion == "sleep":
        time.sleep(1000)
    if completion == "exit":
        sys.exit(0)
    if completion == "_exit":
        os._exit(0)
    if completion == "segfault":
        ctypes.string_at(0)
    if completion == "nan":
        return float("nan")
    row["answer"] = "spoilt"
    return helper.VALUE * len(completion)

def whole(trajectories):
    if trajectories[0].completion == "hang":
        time.sleep(1000)
    return {"length": [len(t.completion) for t in trajectories], "tokens": [len(t.tokens) for t in trajectories]}

def odd():
    return 1.0
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    (folder / "helper.py").write_text("VALUE = 2.0")
    (folder / "mine.py").write_text(FILE)
    return folder / "mine.py"


@pytest.fixture(scope="module")
def rewards(file):
    made = load(f"{file}:score", timeout=2.0)
    yield made
    made.close()


def pids(file):
    noted = file.parent / "pids"
    return [int(line) for line in noted.read_text().split()] if noted.is_file() else []


def test_values_come_from_one_process_which_is_not_this_one(rewards, file):
    before = len(pids(file))
    data = [{"prompt": "a", "answer": "1"}] * 2
    assert [t.rewards["reward"] for t in rewards.score(trajectories("a", "bb", data=data))] == [2.0, 4.0]
    assert data == [{"prompt": "a", "answer": "1"}] * 2
    assert values(rewards, "ccc") == [6.0]
    assert len(set(pids(file)[before:])) == 1 and os.getpid() not in pids(file)


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        ("exit", "reward score on problems.jsonl, row 2 raised SystemExit: 0; completion 'exit'"),
        ("nan", "reward score on problems.jsonl, row 2 returned nan, expected a finite number; completion 'nan'"),
        ("_exit", r"reward score on problems.jsonl, row 2 raised SystemExit: os\._exit\(0\); completion '_exit'"),
        ("segfault", "reward score on problems.jsonl, row 2 ended its process by SIGSEGV; completion 'segfault'"),
        ("hang", r"reward score on problems.jsonl, row 2 did not end within 2 s; completion 'hang'"),
    ],
)
def test_what_goes_wrong_names_the_row_and_the_next_batch_is_scored(rewards, file, completion, message):
    start, before = time.monotonic(), len(pids(file))
    with pytest.raises(RewardError, match=message):
        values(rewards, "a", completion, "b")
    assert time.monotonic() - start < 120
    if completion in ("segfault", "hang"):
        assert all(gone(pid) for pid in pids(file)[before:])
    assert values(rewards, "a") == [2.0]


@pytest.mark.long
@pytest.mark.parametrize("end", ["a caller that stops", "Ctrl-C", "an error of the caller"])
def test_results_that_nobody_took_are_nobody_s(file, end):
    """SURV-9: however a batch ends, the next one gets its own values."""
    asked = AskedElsewhere("reward", f"{file}:score", None, 2.0)
    values_of = asked.score(trajectories("a", "bb", "ccc"))
    first = next(values_of)
    if end == "a caller that stops":
        values_of.close()
    else:
        error = KeyboardInterrupt if end == "Ctrl-C" else LookupError
        with pytest.raises(error):
            values_of.throw(error())
    try:
        later = list(asked.score(trajectories("dddd", "eeeee")))
        assert (first, later) == ({"reward": 2.0}, [{"reward": 8.0}, {"reward": 10.0}])
    finally:
        asked.close()


@pytest.mark.long
def test_the_limit_of_a_result_begins_when_the_file_is_there(tmp_path):
    """SURV-10: neither Python's start nor the imports of the file count."""
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(2.5)\ndef score(completion, row):\n    return 1.0\n")
    rewards = load(f"{file}:score", timeout=2.0)
    try:
        assert values(rewards, "a", "b") == [1.0, 1.0]
    finally:
        rewards.close()


@pytest.mark.long
def test_a_whole_batch_has_the_limit_too(file):
    rewards = load(f"{file}:whole", timeout=1.0)
    try:
        assert rewards.score(trajectories("ab"))[0].rewards == {"length": 2.0, "tokens": 3.0}
        with pytest.raises(RewardError, match=r"reward whole on problems.jsonl, row 1 .*did not end within 1 s"):
            rewards.score(trajectories("hang", "b"))
    finally:
        rewards.close()


def test_a_signature_or_a_file_that_is_wrong_shows_when_it_is_loaded(file, tmp_path):
    with pytest.raises(ValueError, match=r"\.py: the reward odd is odd\(.*a reward takes \(completion, row\)"):
        load(f"{file}:odd", timeout=1.0)
    with pytest.raises(ValueError, match=r"has no function 'absent'"):
        load(f"{file}:absent", timeout=1.0)
    with pytest.raises(ValueError, match="the time limit of a reward must be a positive number of seconds, got 0"):
        load(f"{file}:score", timeout=0)
    with pytest.raises(ValueError, match=r"reward .* cannot run in a process of its own, which a time limit needs"):
        load(lambda completion, row: 1.0, timeout=1.0)


def test_usr_8_a_file_that_hangs_or_leaves_when_it_is_loaded_does_so_in_its_own_process(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text("import os\nos._exit(0)\n")
    with pytest.raises(ValueError, match=r"mine.py cannot be loaded: SystemExit: os\._exit\(0\)"):
        load(f"{file}:score", timeout=1.0)
    file.write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr(reward_process, "START", 0.5)
    with pytest.raises(RewardError, match=r"reward score could not be loaded within 0\.6 s"):
        load(f"{file}:score", timeout=0.1)


def test_usr_8_a_function_in_this_process_cannot_end_it_unseen_nor_move_it(tmp_path):
    """USR-7 too: a reward that calls os.chdir leaves the run where it is."""
    place, file = os.getcwd(), tmp_path / "mine.py"
    (tmp_path / "there").mkdir()
    there = str(tmp_path / "there")
    file.write_text(
        f"import os\nos.chdir({there!r})\ndef score(completion, row):\n    os.chdir({there!r})\n"
        "    if completion == 'leave':\n        os._exit(0)\n"
        "    if completion == 'fork':\n        child = os.fork() or os._exit(3)\n"
        "        return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "    return float(os.getcwd() == " + repr(there) + ")\n"
    )
    rewards = load(f"{file}:score")
    assert os.getcwd() == place and values(rewards, "a") == [1.0] and os.getcwd() == place
    with pytest.raises(RewardError, match=r"reward score on .* raised SystemExit: os\._exit\(0\)"):
        values(rewards, "leave")
    assert os.getcwd() == place
    elsewhere = load(f"{file}:score", timeout=20.0)  # a fork of this process would be one of JAX's threads
    assert values(elsewhere, "fork") == [3.0]
    elsewhere.close()
    file.write_text("import os\nos._exit(0)\n")
    with pytest.raises(ValueError, match=r"mine.py cannot be loaded: SystemExit: os\._exit\(0\)"):
        load(f"{file}:score")


def test_the_process_ends_with_the_run_that_was_killed(file):
    program = (
        "import sys; from rl_bridge.rewards import load; from tests.support.reward_batches import trajectories\n"
        f"load({str(file) + ':score'!r}, timeout=100.0).score(trajectories('sleep'))"
    )
    before = set(pids(file))
    path = os.pathsep.join(entry for entry in sys.path if entry)
    driver = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path})
    deadline = time.monotonic() + 60
    while not (started := set(pids(file)) - before):
        assert time.monotonic() < deadline and driver.poll() is None, "the reward did not start"
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert all(gone(pid) for pid in started)


@pytest.mark.long
def test_a_process_that_ends_between_two_batches_is_named(tmp_path):
    file = tmp_path / "dies.py"
    file.write_text("import os, threading\ndef score(completion, row):\n"
                    "    threading.Timer(0.05, os._exit, [3]).start()\n    return 1.0\n")  # fmt: skip
    rewards = load(f"{file}:score", timeout=20.0)
    try:
        assert values(rewards, "a") == [1.0]
        time.sleep(0.5)
        with pytest.raises(RewardError, match=r"reward score on .*row 1 ended its process with exit status 3"):
            values(rewards, "b")
        assert values(rewards, "c") == [1.0]
    finally:
        rewards.close()


TOGETHER = """
import asyncio, pathlib
ONE, LATER = asyncio.Semaphore(1), [asyncio.Event() for _ in range(6)]
HERE = pathlib.Path(__file__).parent

async def score(completion, row):
    async with ONE:
        if completion == "hang":
            await asyncio.Event().wait()
        while completion == "later" and not (HERE / "taken").is_file():
            await asyncio.sleep(0.001)
        return 1.0

async def backwards(completion, row):
    place = int(completion)
    if place < 5:
        await LATER[place + 1].wait()
    await asyncio.sleep(0.5)
    LATER[place].set()
    return float(place)
"""


@pytest.fixture
def together(tmp_path):
    (tmp_path / "together.py").write_text(TOGETHER)
    return tmp_path / "together.py"


@pytest.mark.long
def test_the_row_whose_coroutine_hangs_is_named_and_not_the_first(together):
    rewards = load(f"{together}:score", timeout=2.0)
    try:
        with pytest.raises(RewardError, match="row 3 did not end within 2 s; completion 'hang'"):
            values(rewards, "a", "b", "hang", "c", "d")
        assert values(rewards, "a") == [1.0]
    finally:
        rewards.close()


def test_a_coroutine_s_value_is_sent_when_it_is_there(together):
    asked = AskedElsewhere("reward", f"{together}:score", None, 60.0)
    try:
        results = asked.score(trajectories("a", "later"))
        first = next(results)
        (together.parent / "taken").touch()
        assert (first, next(results)) == ({"reward": 1.0}, {"reward": 1.0})
    finally:
        asked.close()


@pytest.mark.long
def test_a_coroutine_may_wait_for_all_others_for_longer_than_the_limit_of_one(together):
    rewards = load(f"{together}:backwards", timeout=2.0)
    try:
        assert values(rewards, *map(str, range(6))) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    finally:
        rewards.close()


ENDS = """
import asyncio, atexit, os, pathlib, time
HERE = pathlib.Path(__file__).parent
BUFFERED, TASKS = (HERE / "buffered").open("w"), []
atexit.register((HERE / "atexit").touch)

async def beside():
    try:
        await asyncio.Event().wait()
    finally:
        (HERE / "finally").touch()

def score(completion, row):
    BUFFERED.write(completion)
    (HERE / "pid").write_text(str(os.getpid()))
    return 1.0

async def later(completion, row):
    TASKS.append(asyncio.create_task(beside()))
    await asyncio.sleep(0)
    return score(completion, row)

def hangs(completion, row):
    return score(completion, row)

async def close():
    await asyncio.sleep(0)
    (HERE / "close").touch()

score.close = (HERE / "close").touch
later.close = close
hangs.close = lambda: time.sleep(1000)
"""


@pytest.mark.parametrize("name, files", [("score", ()), ("later", ("finally",)), ("hangs", None)])
def test_a_process_that_is_not_needed_any_more_ends_what_it_began(name, files, tmp_path, monkeypatch):
    """A function's close(), atexit, files with a buffer and what coroutines do at their end were lost."""
    monkeypatch.setattr(reward_process, "GRACE", 60.0 if files is not None else 0.1)
    (tmp_path / "ends.py").write_text(ENDS)
    rewards = load(f"{tmp_path / 'ends.py'}:{name}", timeout=60.0)
    assert values(rewards, "abc") == [1.0]
    rewards.close()
    assert gone(int((tmp_path / "pid").read_text()))
    if files is not None:
        assert all((tmp_path / file).is_file() for file in ("close", "atexit", *files))
        assert (tmp_path / "buffered").read_text() == "abc"


@pytest.mark.parametrize("name", ["score", "later"])
def test_a_process_whose_results_nobody_takes_ends_what_it_began(name, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(reward_process, "GRACE", 60.0)
    (tmp_path / "ends.py").write_text(ENDS)
    results = AskedElsewhere("reward", f"{tmp_path / 'ends.py'}:{name}", None, 60.0).score(trajectories(*"abcdef"))
    next(results)
    results.close()
    assert all((tmp_path / file).is_file() for file in ("close", "atexit"))
    assert "Traceback" not in capfd.readouterr().err
