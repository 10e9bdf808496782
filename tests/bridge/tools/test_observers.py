"""What the command line makes of the options that observers read, beside a real run: TensorBoard, machine, memory."""

import json
from contextlib import suppress

import psutil
import pytest

from rl_bridge.run.options import RunOptions
from rl_bridge.run.recorder import Recorder
from rl_tools.cli import main
from rl_tools.export.export import key_of
from rl_tools.export.live import Exporters
from rl_tools.profile.profiler import MemoryProfiler
from rl_tools.trainers import observers_of
from tests.bridge.tools.export.ledgers import curves
from tests.bridge.tools.export.stores import READERS
from tests.bridge.tools.export.watching import processes_of, wait_for
from tests.support.short_policy import SHORT, short_words

pytestmark = pytest.mark.long


def test_options_make_their_observers():
    assert observers_of(RunOptions()) == []
    kinds = [type(one) for one in observers_of(RunOptions(trackers=("tensorboard",), system_every=1.0, memory=True))]
    assert kinds == [Exporters, MemoryProfiler]
    assert [type(one) for one in observers_of(RunOptions(system_every=1.0))] == [Exporters]


def test_a_tracker_that_is_not_installed_is_told_before_there_is_a_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["train", "policy", "--output", str(tmp_path), "--trackers", "wandb", *SHORT]) == 1
    assert capsys.readouterr().err.endswith("wandb is not installed: pip install '.[trackers]'\n")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def training(tmp_path):
    """Trains with all options that observers read; returns the run's folder."""
    words = ["--trackers", "tensorboard", "--tracker-output", str(tmp_path / "store"), "--tracker-project", "tests"]
    words += ["--system-every", "0.2", "--memory", "--output", str(tmp_path), "--name", "run"]
    words += short_words(tmp_path)

    def train(*more):
        assert main(["train", "policy", *words, *more]) == 0
        return tmp_path / "run"

    yield train
    wait_for("the end of what ran beside the run", lambda: not processes_of(tmp_path / "run"))


def check(folder):
    """TensorBoard has the record, each curve once."""
    store, recorded = READERS["tensorboard"](folder.parent / "store", "tests", key_of(folder)), curves(folder)
    assert recorded and {curve: store[curve] for curve in recorded} == recorded


def test_a_run_and_its_resumption_are_exported_sampled_and_profiled(training):
    folder = training()
    check(folder)
    folder = training("--resume", "--resume-anyway", "--policy.steps", "2")
    check(folder)
    steps = [line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "stage" in line]
    assert [line["step"] for line in steps if line["stage"] == "policy"] == [0, 1]
    assert all(line["memory_peak"] >= line["memory_live"] > 0 for line in steps)
    assert (folder / "system.jsonl").stat().st_size and (folder / "memory.png").stat().st_size


def test_an_exporter_that_is_killed_ends_no_run(training, tmp_path, capsys, monkeypatch):
    write = Recorder.write

    def killing(self, record):
        for process in processes_of(tmp_path / "run"):
            with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
                if "rl_tools.export.live_process" in process.cmdline():
                    process.kill()
        write(self, record)

    monkeypatch.setattr(Recorder, "write", killing)
    folder = training()
    assert (folder / "summary.json").is_file()
    assert "tensorboard is behind this run: its exporter ended with signal 9" in capsys.readouterr().out
    words = ["--to", "tensorboard", "--output", str(tmp_path / "store"), "--project", "tests"]
    assert main(["export", str(folder), *words]) == 0
    check(folder)
