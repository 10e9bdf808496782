"""A reward function is the same function wherever it is called: in turn, beside training, in a process of its own.

Every kind of function × every place gives the values of ``len(completion)`` in three batches, or is refused when it is
loaded or tried, with the option that cures it: a process of its own, which is one of the places.
"""

import asyncio
import concurrent.futures
import socketserver
import threading
from pathlib import Path

import pytest

from rl_bridge.rewards import RewardError, load
from rl_tools.cli import main
from tests.support.reward_batches import rows, values

# ``asyncio.run`` refuses its coroutine before it begins.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine 'later' was never awaited:RuntimeWarning")
BATCHES = (["", "ab", "c"], ["abc", "d", "ef"], ["g", "hi", "jkl"])
TIMEOUT = "--reward-timeout"
SECONDS = 60.0

ALARM = """
import signal

def limited(completion):
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        return len(completion)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
"""
SCORE = "\ndef score(completion, row):\n    return "
LATER = "\nasync def score(completion, row):\n    return "
POOL = """
import concurrent.futures, multiprocessing
POOL = []

def work(completion):
    return len(completion)

def score(completion, row):
    if not POOL:
        POOL.append(concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))
    return POOL[0].submit(work, completion).result()

score.close = lambda: [pool.shutdown() for pool in POOL]
"""
SEMAPHORE = """
import asyncio
ONE = asyncio.Semaphore(1)

async def score(completion, row):
    async with ONE:
        await asyncio.sleep(0)
        return len(completion)
"""
CONNECTION = """
import asyncio, pathlib
PORT = int((pathlib.Path(__file__).parent / "port").read_text())
ONE, KEPT = asyncio.Lock(), []

async def score(completion, row):
    async with ONE:
        if not KEPT:
            KEPT.extend(await asyncio.open_connection("127.0.0.1", PORT))
        reader, writer = KEPT
        writer.write(completion.encode() + b"\\n")
        return int(await reader.readline())

async def close():
    for writer in KEPT[1:]:
        writer.close()
        await writer.wait_closed()

score.close = close
"""
TASK = """
import asyncio
TASK = []

async def beside(queue):
    while True:
        completion, future = await queue.get()
        future.set_result(len(completion))

async def score(completion, row):
    if not TASK:
        TASK.append(asyncio.Queue())
        TASK.append(asyncio.create_task(beside(TASK[0])))
    future = asyncio.get_running_loop().create_future()
    await TASK[0].put((completion, future))
    return await future

async def close():
    for task in TASK[1:]:
        task.cancel()

score.close = close
"""
OLD_LOOP = """
import asyncio

async def later(completion):
    return len(completion)

def score(completion, row):
    return asyncio.run(later(completion))
"""
LOCAL_AT_IMPORT = (
    "import threading\nLOCAL = threading.local()\nLOCAL.length = len\n" + SCORE + "LOCAL.length(completion)\n"
)
LOCAL = """
import threading
LOCAL = threading.local()

def score(completion, row):
    if not hasattr(LOCAL, "length"):
        LOCAL.length = len
    return LOCAL.length(completion)
"""
DATABASE = """
import sqlite3
KEPT = []

def score(completion, row):
    if not KEPT:
        KEPT.append(sqlite3.connect(":memory:"))
    return KEPT[0].execute("select length(?)", (completion,)).fetchone()[0]

score.close = lambda: [kept.close() for kept in KEPT]
"""
CACHE = """
CACHE = {}

def score(completion, row):
    return CACHE.setdefault(completion, len(completion))
"""
DATACLASS = """
import dataclasses, pickle

@dataclasses.dataclass
class Value:
    value: int

def score(completion, row):
    return pickle.loads(pickle.dumps(Value(len(completion)))).value
"""
TWO = """
SEEN = {}

def score(completion, row):
    SEEN[completion] = len(completion)
    return len(completion)

def again(completion, row):
    return SEEN[completion]
"""
KINDS = {
    "alarm": ALARM + SCORE + "limited(completion)\n",
    "alarm in a coroutine": ALARM + LATER + "limited(completion)\n",
    "process pool": POOL,
    "semaphore": SEMAPHORE,
    "kept connection": CONNECTION,
    "task that goes on": TASK,
    "coroutine of a plain function": "async def later(c):\n    return len(c)\n" + SCORE + "later(completion)\n",
    "asyncio.run": OLD_LOOP,
    "thread-local of the import": LOCAL_AT_IMPORT,
    "thread-local": LOCAL,
    "kept database": DATABASE,
    "cache": CACHE,
    "dataclass": DATACLASS,
    "neighbour": "from helper_of_places import length\n" + SCORE + "length(completion)\n",
    "neighbour at the call": SCORE + "__import__('helper_of_places').length(completion)\n",
    "relative import": "from .helper_of_places import length\n" + SCORE + "length(completion)\n",
    "two of a file": TWO,
}
BESIDE = dict.fromkeys(("alarm", "thread-local of the import", "kept database"), TIMEOUT)
EVERYWHERE = {"relative import": "import NAME"}
HERE = EVERYWHERE | {"alarm in a coroutine": TIMEOUT}
REFUSED = {
    "in turn": HERE,
    "in a running loop": HERE | {"asyncio.run": TIMEOUT},
    "beside training": HERE | BESIDE,
    "evaluated beside training": HERE | BESIDE,
    "own process": EVERYWHERE,
    "beside another": HERE,
}
"""Place → kind → the way on that its refusal names."""


class Length(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(b"%d\n" % (len(line) - 1))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of each kind."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "helper_of_places.py").write_text("def length(text):\n    return len(text)\n")
    (folder / "other_of_places.py").write_text(CACHE)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Length) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (folder / "port").write_text(str(server.server_address[1]))
        for number, source in enumerate(KINDS.values()):
            (folder / f"kind_{number}_of_places.py").write_text(source)
        yield {kind: folder / f"kind_{number}_of_places.py" for number, kind in enumerate(KINDS)}
        server.shutdown()


def in_a_thread(call):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def scored(place, file):
    """The values of three batches."""
    sources = [f"{file}:score", *([f"{file}:again"] if "again" in file.read_text() else [])]
    if place == "beside another":
        sources.append(f"other={file.parent / 'other_of_places.py'}:score")
    rewards = load(sources, timeout=SECONDS if place == "own process" else None)

    def batch(texts):
        of_all = [values(rewards, *texts, name=name) for name in rewards.names]
        assert all(of_one == of_all[0] for of_one in of_all), "every reward of these files is the length"
        return of_all[0]

    async def notebook():
        rewards.try_on(rows(2))
        return [batch(texts) for texts in BATCHES]

    try:
        if place == "in a running loop":
            return asyncio.run(notebook())
        # A process of its own cures what cannot be called beside training: it is asked from there, too.
        beside = "training" in place or place == "own process"
        rewards.try_on(rows(2), beside=beside)
        if place == "beside training":
            return in_a_thread(lambda: [batch(texts) for texts in BATCHES])
        if beside:
            return [batch(BATCHES[0]), in_a_thread(lambda: batch(BATCHES[1])), batch(BATCHES[2])]
        return [batch(texts) for texts in BATCHES]
    finally:
        rewards.close()


@pytest.mark.parametrize("place", REFUSED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_gives_the_same_numbers_in_every_place_or_is_refused_with_the_way_on(kind, place, files):
    expected = [[float(len(text)) for text in texts] for texts in BATCHES]
    way_on = REFUSED[place].get(kind)
    if way_on is None:
        assert scored(place, files[kind]) == expected
        return
    with pytest.raises((RewardError, ValueError)) as refused:
        scored(place, files[kind])
    assert way_on in str(refused.value)


@pytest.mark.long
def test_the_command_refuses_a_reward_that_cannot_be_called_beside_training(files, tmp_path, capsys, monkeypatch):
    """Report 21: the trial and the first evaluation passed, and the run ended at step 0."""
    monkeypatch.chdir(tmp_path)
    words = f"train policy --reward {files['alarm']}:score --asynchronous.max-staleness 1 --output runs --name a"
    assert main([*words.split(), "--sft.steps", "0", "--policy.steps", "1"]) == 1
    said = capsys.readouterr().err
    assert "signal only works in main thread" in said and TIMEOUT in said and "Traceback" not in said
    assert not list(Path("runs").glob("*"))
