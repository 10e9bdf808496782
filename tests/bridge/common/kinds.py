"""Children of every kind with a stand-in for what runs in them.

``python -m tests.bridge.common.kinds FOLDER`` opens one of each, forks itself, and prints the children's processes.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

from rl_bridge.common.children import Child

WORK = """
import os, pathlib, posix, subprocess, sys, time
folder = pathlib.Path(os.environ["STAND_IN"])

def work(*ignored):
    (folder / "new").write_text(f"{os.getpid()} {subprocess.Popen(['sleep', '1000']).pid}")
    (folder / "new").rename(folder / "pids")
    while not (folder / "end").exists():
        time.sleep(0.02)
    print("the last line", file=sys.stderr, flush=True)
    posix._exit(7)
"""
"""``work`` notes its process and one that it has started, and ends with exit status 7 as soon as it is told to."""
REWARD = "def score(completion, row):\n    work()\n"
ENVIRONMENT = "class Game:\n    reset = step = work\n"


class Opened(NamedTuple):
    """A child at work."""

    child: Child
    close: Callable[[], None]
    report: Callable[[], str]
    """Waits for the child's end and returns what its caller, the terminal and the log say of that end."""


def file(folder: Path, name: str, text: str) -> Path:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(WORK + text)
    return folder / name


def error_of(function: Callable, *arguments) -> Callable[[], str]:
    future = ThreadPoolExecutor(1).submit(function, *arguments)
    return lambda: str(future.exception(60))


def reward(folder: Path) -> Opened:
    from rl_bridge.data.trajectory import single_turn
    from rl_bridge.rewards import with_rows
    from rl_bridge.rewards.reward_process import AskedElsewhere, RewardProcess

    words = ({"role": "user", "content": "1+1="}, {"role": "assistant", "content": "a"})
    batch = with_rows([single_turn([2], [3], group=0, messages=words)], [{"prompt": "1+1=", "_where": "row 1"}])
    source, process = f"{file(folder, 'mine.py', REWARD)}:score", RewardProcess()
    asked = AskedElsewhere("reward", source, None, 600.0, process).begin()
    assert process.running is not None
    child = process.running.child
    report = error_of(lambda: list(asked.score(batch)))
    return Opened(child, asked.close, report)


def environment(folder: Path) -> Opened:
    from rl_bridge.environments import load_environment
    from rl_bridge.environments.environment_calls import EnvironmentProcesses

    factory = load_environment(f"{file(folder, 'mine.py', ENVIRONMENT)}:Game")
    processes = EnvironmentProcesses(factory, limit=600.0)
    return Opened(processes._process, processes.close, error_of(processes.session().reset, {}))


def server(folder: Path) -> Opened:
    from rl_bridge.rollout.served.process import ServerProcess

    process = ServerProcess([sys.executable, file(folder, "mine.py", "work()")], folder / "log")
    return Opened(process, process.stop, error_of(process.wait_until, lambda: False, 60.0))


def trial(folder: Path) -> Opened:
    from rl_tools.tune.journal import Key
    from rl_tools.tune.study import TrialProcesses, places

    words = [sys.executable, str(file(folder, "mine.py", "work()"))]
    trials = TrialProcesses(folder, lambda *ignored: words, places(1), grace=0.2)
    trials.start(Key(0, 0), {}, 0)

    def report() -> str:
        while not (ended := trials.ended()):
            time.sleep(0.02)
        return str(ended)

    return Opened(trials._running[Key(0, 0)], trials.kill, report)


def sampler(folder: Path) -> Opened:
    from rl_tools.export.live import Exporters, LiveExport

    if (folder / "end").exists():
        (folder / "system.jsonl").mkdir()
    exporters = Exporters(LiveExport(system_every=0.05))
    exporters.started(Mock(folder=folder))
    child = exporters._sampler
    return Opened(child, lambda: exporters.ended(None), lambda: f"{child.how_it_ended()}; {child.tail()}")


def live_export(folder: Path) -> Opened:
    """TensorBoard's library is the stand-in."""
    from rl_bridge.common.files import write_json
    from rl_bridge.run.provenance import write_provenance
    from rl_bridge.run.recorder import Recorder
    from rl_tools.export.export import ExportOptions
    from rl_tools.export.live import Exporters, LiveExport
    from rl_tools.export.live_process import Limits

    (folder / "run").mkdir()
    write_json(folder / "run/config.json", {})
    recorder = Recorder(folder / "run", None, again=False)
    write_provenance(folder / "run", recorder.attempt, {})
    recorder.close()
    file(folder, "tensorboard/__init__.py", "work()")
    options = ExportOptions(to="tensorboard", output=folder)
    exporters = Exporters(LiveExport([options], limits=Limits(end=0.2), patience=60.0))
    exporters.started(Mock(folder=folder / "run"))
    [(_, child, listener)] = exporters._processes
    return Opened(child, lambda: exporters.ended(None), lambda: listener.join(60.0) or child.tail())


KINDS = {kind.__name__: kind for kind in (reward, environment, server, trial, sampler, live_export)}


def begun(folder: Path, opened: Opened) -> list[int]:
    """Processes of a child that is at work."""
    progress = folder / ("system.jsonl" if opened.child.log == folder / "exports/system.log" else "pids")
    while not (progress.exists() and progress.stat().st_size):
        assert not opened.child.dead.wait(0.02), opened.child.tail()
    pids = [] if progress.suffix else [*map(int, progress.read_text().split())]
    return [opened.child.pid, opened.child._guard.pid, *pids]


if __name__ == "__main__":
    at_work = {}
    for name, kind in KINDS.items():
        place = Path(sys.argv[1], name)
        place.mkdir()
        os.environ["STAND_IN"] = str(place)
        opened = kind(place)
        at_work[name] = opened, begun(place, opened)
    if os.fork():
        print(json.dumps({name: pids for name, (_, pids) in at_work.items()}), flush=True)
    time.sleep(1000.0)
