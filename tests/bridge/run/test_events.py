"""The events of a run are a copy of its record: where they cannot grow, the run says so once and goes on."""

import resource
import threading
from dataclasses import dataclass

import pytest

from rl_bridge.run.records import read_records
from rl_bridge.run.run import Run

STEPS = 60


@dataclass
class Config:
    seed: int = 0


@pytest.fixture
def raised(monkeypatch):
    """What threads ended with: TensorBoard's writer has one."""
    found = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: found.append(arguments.exc_value))
    return found


def test_events_that_cannot_grow_are_told_once_and_the_run_goes_on(tmp_path, capsys, raised):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Of each record the events are several times as long as the line.
    metrics = {f"m{number}": 1.0 for number in range(40)}
    with Run(tmp_path / "run", Config()) as run:
        resource.setrlimit(resource.RLIMIT_FSIZE, (48 * 1024, hard))
        try:
            for step in run.steps("policy", STEPS, state={}):
                run.log(step, metrics)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().out
    assert [type(error) for error in raised] == [OSError], "the limit was reached"
    assert said.count("no more TensorBoard events: [Errno 27] File too large; to catch up: `rl-fn export") == 1
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(STEPS))


def test_a_figure_that_cannot_be_drawn_costs_no_run_usr_16(tmp_path, capsys, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no font")

    monkeypatch.setattr("rl_bridge.run.recorder.draw_curves", broken)
    with Run(tmp_path / "run", Config()) as run:
        for step in run.steps("policy", 1, state={}):
            run.log(step, {"reward": 1.0})
        run.finish({"result": "well"})
    assert "curves.png is not drawn: RuntimeError: no font" in capsys.readouterr().out
    assert (tmp_path / "run" / "summary.json").is_file()
