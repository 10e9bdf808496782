"""Observers of a run: an object of the user's that is called at the start, at each step and at the end."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_bridge.common.files import RunLock
from rl_bridge.run.options import RunOptions
from rl_bridge.run.run import Observer, Run, open_run
from tests.support.counting_run import Options, go


class Listener(Observer):
    """Keeps what it is called with, and has a metric of its own."""

    def __init__(self, calls):
        self.calls = calls

    def started(self, run):
        self.calls.append(("started", run.folder.name))

    def metrics(self, number):
        return {"watts": 100.0 + number}

    def recorded(self, record):
        self.calls.append((record["stage"], record["step"], record["reward"], record["watts"]))

    def ended(self, error):
        self.calls.append(("ended", str(error)))


class Failing(Observer):
    """Raises where it is told to, with a secret of the environment in its message."""

    def __init__(self, method):
        self.method, self.calls = method, []

    def _call(self, method):
        self.calls.append(method)
        if method == self.method:
            raise ConnectionError("no answer of https://me:planted-password@tracker")
        return {}

    def started(self, run):
        self._call("started")

    def metrics(self, number):
        return self._call("metrics")

    def recorded(self, record):
        self._call("recorded")

    def ended(self, error):
        self._call("ended")


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_observer_hears_of_the_start_every_record_and_the_end(tmp_path):
    calls = []
    go(tmp_path / "run", observers=[Listener(calls)])
    steps = [("only", step, step + 1.0, 100.0 + step) for step in range(6)]
    assert calls == [("started", "run"), *steps, ("ended", "None")]
    assert [record["watts"] for record in lines(tmp_path / "run")] == [100.0 + step for step in range(6)]


def test_an_observer_of_a_resumed_run_goes_on_with_its_records(tmp_path):
    go(tmp_path / "run", until=4, observers=[Listener([])])
    calls = []
    go(tmp_path / "run", resume=True, observers=[Listener(calls)])
    assert calls[1:-1] == [("only", 4, 5.0, 104.0), ("only", 5, 6.0, 105.0)]


def test_an_observer_is_told_what_ended_the_run(tmp_path):
    calls = []
    with pytest.raises(RuntimeError, match="planted"), Run(tmp_path / "run", Options(), observers=[Listener(calls)]):
        raise RuntimeError("planted")
    assert calls == [("started", "run"), ("ended", "planted")]


@pytest.mark.parametrize(("method", "heard"), [("metrics", ["metrics"]), ("recorded", ["metrics", "recorded"])])
def test_an_observer_that_fails_ends_no_run_and_is_told_once(tmp_path, capsys, method, heard):
    failing, calls = Failing(method), []
    assert len(go(tmp_path / "run", observers=[failing, Listener(calls)])) == 6
    assert failing.calls == ["started", *heard, "ended"] and len(calls) == 8
    said, notes = capsys.readouterr().out, [line["note"] for line in lines(tmp_path / "run") if "note" in line]
    assert notes == [
        "Failing failed, and the run goes on without it: ConnectionError: no answer of https://***@tracker"
    ]
    assert said.count(notes[0]) == 1 and "planted-password" not in said


@pytest.mark.parametrize("value", [None, "many", object()], ids=["none", "a word", "an object"])
def test_an_observer_whose_metric_is_no_number_fails_alone(tmp_path, value):
    broken = SimpleNamespace(started=id, ended=id, recorded=id, metrics=lambda number: {"watts": 1.0, "volts": value})
    assert len(go(tmp_path / "run", observers=[broken])) == 6
    first, *steps = lines(tmp_path / "run")
    assert "the run goes on without it: TypeError" in first["note"] or "ValueError" in first["note"]
    assert len(steps) == 6 and not any("watts" in step for step in steps)


def test_an_observer_gives_numbers_of_any_library_and_changes_none_of_the_runs_own(tmp_path):
    mine = {"watts": np.float32(1.5), "volts": torch.tensor(2), "reward": -1.0, "stage": 5.0, "step": 7, "skipped": 1}
    busy = SimpleNamespace(started=id, ended=id, metrics=lambda number: mine, recorded=lambda record: record.clear())
    calls = []
    assert len(go(tmp_path / "run", observers=[busy, Listener(calls)])) == 6
    assert [call[:3] for call in calls[1:-1]] == [("only", step, step + 1.0) for step in range(6)]
    assert all(line["volts"] == 2.0 for line in lines(tmp_path / "run"))


def test_ctrl_c_in_an_observers_end_lets_go_of_the_folder(tmp_path):
    def ended(error):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(
            tmp_path / "run",
            observers=[SimpleNamespace(started=id, ended=ended, metrics=lambda number: {}, recorded=id)],
        )
    RunLock(tmp_path / "run").release()


def test_an_observer_that_fails_at_the_end_is_told(tmp_path, capsys):
    failing, calls = Failing("ended"), []
    assert len(go(tmp_path / "run", observers=[failing, Listener(calls)])) == 6
    assert calls[-1] == ("ended", "None")
    assert "Failing failed, and the run goes on without it: ConnectionError" in capsys.readouterr().out


def test_an_observer_that_cannot_start_refuses_the_run_and_lets_go_of_the_folder(tmp_path):
    calls, failing = [], Failing("started")
    with pytest.raises(ConnectionError):
        go(tmp_path / "run", observers=[Listener(calls), failing])
    assert calls[0] == ("started", "run") and calls[1][0] == "ended" and len(calls) == 2
    assert failing.calls == ["started", "ended"]
    assert len(go(tmp_path / "run")) == 6  # the folder is gone, and another process may make it


@pytest.mark.parametrize("option", [{"trackers": ("wandb",)}, {"system_every": 1.0}, {"memory": True}])
def test_an_option_that_no_observer_reads_is_refused(tmp_path, option):
    [name] = option
    options = RunOptions(output=tmp_path, **option)
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} .* has no effect without an observer"):
        open_run(options, {}, None, [Listener([])])
    with open_run(options, {}, None, [SimpleNamespace(serves=(name,), started=id, ended=id)]) as run:
        assert run.folder.parent == tmp_path
