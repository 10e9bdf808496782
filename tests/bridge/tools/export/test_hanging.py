"""A tracker that hangs for ever beside a real run: no step waits, the user is told once, and nothing is lost."""

import dataclasses
import json
import os
import signal
import socket
import time

import pytest

from rl_bridge.run.recorder import Recorder
from rl_tools.cli import main
from rl_tools.export import live
from rl_tools.export.export import key_of
from rl_tools.export.live_process import Limits
from tests.bridge.tools.export.stores import READERS
from tests.bridge.tools.export.watching import ALL, processes_of, rows_sent, wait_for
from tests.support.short_policy import SHORT

pytestmark = pytest.mark.tools
STEPS, PATIENCE = 3, 1.0


@pytest.fixture
def trainer(tmp_path, output, monkeypatch):
    """Trains; ``at(record)`` is called before the next record. Returns (run's folder, seconds between records)."""
    made = live.live_export
    write, folder = Recorder.write, tmp_path / "run"

    def train(trackers, at=lambda number: None, *, hang=600.0):
        short = {"limits": Limits(every=0.05, hang=hang, end=600.0), "patience": PATIENCE}
        monkeypatch.setattr(live, "live_export", lambda *given: dataclasses.replace(made(*given), **short))
        times = []

        def noted(self, record):
            at(len(times))
            times.append(time.monotonic())
            write(self, record)

        monkeypatch.setattr(Recorder, "write", noted)
        words = ["--output", str(tmp_path), "--name", "run", "--tracker-output", str(output)]
        words += ["--tracker-project", "tests", "--trackers", ",".join(trackers)]
        words += [*SHORT, "--policy.steps", str(STEPS)]
        assert main(["train", "policy", *words]) == 0
        # The end of the run waits for its trackers once, not for each of them.
        assert time.monotonic() - times[-1] < PATIENCE + 120.0
        return folder

    yield train
    for process in processes_of(folder):
        process.kill()
    wait_for("the end of what was stopped", lambda: not processes_of(folder))


def records(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if "stage" in (record := json.loads(line))]


def caught_up(folder, output, name):
    """``rl-fn export``; then each record's reward is in the store once, at its place."""
    words = ["--to", name, "--output", str(output), "--project", "tests"]
    assert main(["export", str(folder), *words]) == 0
    found = READERS[name](output, "tests", key_of(folder))
    wanted = [(n, r["reward"]) for n, r in enumerate(records(folder)) if r["stage"] == "policy"]
    assert len(wanted) == STEPS and found["policy/reward", "step"] == [(n, pytest.approx(v)) for n, v in wanted]


def test_no_step_waits_for_trackers_whose_processes_are_stopped(trainer, output, tmp_path, capsys):
    """SIGSTOP of all trackers and of the libraries' own processes when each has had a row, with their locks held."""
    sent = {}

    def at(number):
        folder = tmp_path / "run"
        if number == 2:
            wait_for("a row in each store", lambda: [rows_sent(folder).get(n, 0) > 0 for n in ALL] == [True] * 4)
            for process in processes_of(folder):
                process.suspend()
            wait_for("the stop", lambda: {p.status() for p in processes_of(folder)} == {"stopped"})
            sent.update(rows_sent(folder))

    folder = trainer(ALL, at)
    assert len(records(folder)) == STEPS + 1 and max(sent.values()) < STEPS + 1
    # They did nothing in all of the later steps: whoever waits for one of them waits for ever.
    assert {p.status() for p in processes_of(folder)} == {"stopped"} and rows_sent(folder) == sent
    said = capsys.readouterr().out
    for name in ALL:
        again = f"{name} still gets the end of this run; if it does not: `rl-fn export {folder} --to {name}"
        assert said.count(again) == 1 == said.count(f"--to {name} ")
    for process in processes_of(folder):
        os.kill(process.pid, signal.SIGKILL)
    wait_for("their end", lambda: not processes_of(folder))
    for name in ALL:
        caught_up(folder, output, name)


def test_no_step_waits_for_a_tracker_whose_library_waits_for_ever(trainer, output, monkeypatch, capsys):
    """MLflow's own client, with a server that takes every connection and never answers."""
    printed = []

    def at(number):
        if number == 2:  # a short run may have ended before the exporter has waited for its second
            wait_for("the line", lambda: printed.append(capsys.readouterr().out) or "is behind" in "".join(printed))

    with monkeypatch.context() as patch, socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        patch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        folder = trainer(["mlflow"], at, hang=1.0)
        assert rows_sent(folder) == {} and len(records(folder)) == STEPS + 1
        for process in processes_of(folder):
            process.kill()
        wait_for("the exporter's end", lambda: not processes_of(folder))
    said = "".join([*printed, capsys.readouterr().out])
    assert said.count("mlflow is behind this run: no answer for 1 s; to catch up: `rl-fn export") == 1
    # Nothing more of the tracker at the run's end: that line has told how to catch up.
    assert said.count("mlflow is behind") == 1 and "still gets" not in said
    caught_up(folder, output, "mlflow")
