import dataclasses
import decimal
import errno
import itertools
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from rl_bridge.checkpoints import CheckpointError
from rl_bridge.common import step_folders
from rl_bridge.common.statistics import confidence_interval
from rl_bridge.run.options import RunOptions
from rl_bridge.run.recorder import draw_curves
from rl_bridge.run.run import Run, Stopped


@dataclass
class Config:
    rate: float = 0.5


class Counter:
    """State that a resumed run must have back."""

    def __init__(self):
        self.count = 0

    def checkpoint_state(self):
        return {"count": self.count}

    def load_checkpoint_state(self, state):
        self.count = state["count"]


SESSIONS = itertools.count()


class Killed(Exception):
    pass


STAGES = (("first", 4), ("second", 8))


def go(folder, *, resume=False, kill_at=None, interrupt_at=None, interrupted_by=signal.SIGINT, every=3, stages=STAGES):
    """A run whose metric is its counter; ``kill_at`` = (stage, step) dies after that step was logged."""
    counter, visited = Counter(), []
    # Event files are read in the order of the seconds in their names: sessions of a real run start seconds apart.
    ahead = 10 * next(SESSIONS)
    clock = SimpleNamespace(time=lambda: time.time() + ahead)
    with (
        patch.object(event_file_writer, "time", clock),
        Run(folder, Config(), resume=resume, checkpoint_every=every) as run,
    ):
        for stage, total in stages:
            for step in run.steps(stage, total, state={"counter": counter}):
                counter.count += 1
                visited.append((stage, step))
                if (stage, step) == interrupt_at:
                    signal.raise_signal(interrupted_by)
                run.log(step, {"reward": float(counter.count)}, tokens=10)
                if (stage, step) == kill_at:
                    raise Killed
            counter.count += 100 if stage == "first" else 0
        run.finish({"count": counter.count})
    return visited


def metrics(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [(r["stage"], r["step"], r["reward"]) for r in records]


def events(folder):
    accumulator = EventAccumulator(str(folder / "events")).Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags if tag.endswith("reward")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    go(folder)
    return folder


def test_what_a_run_leaves_behind(whole):
    names = {path.name for path in whole.iterdir()}
    written = {"config.json", "metrics.jsonl", "provenance.jsonl", "events", "curves.png", "summary.json"}
    assert names == {".lock", "checkpoints", *written}
    assert json.loads((whole / "config.json").read_text()) == {"rate": 0.5}
    assert json.loads((whole / "summary.json").read_text()) == {"count": 112}
    assert [m[:2] for m in metrics(whole)] == [("first", i) for i in range(4)] + [("second", i) for i in range(8)]
    logged = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert all(r["tokens_per_second"] > 0 and r["seconds"] >= 0 for r in logged)
    assert [r["seconds"] for r in logged] == sorted(r["seconds"] for r in logged)
    rewards = [reward for _, _, reward in metrics(whole)]
    assert events(whole) == {
        "first/reward": list(enumerate(rewards[:4])),
        "second/reward": list(enumerate(rewards[4:], 4)),
    }
    with Image.open(whole / "curves.png") as image:
        image.load()
        assert image.format == "PNG" and min(image.size) > 200
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["step-00000010", "step-00000012"]


def test_seconds_are_of_all_sessions(tmp_path):
    now = 100.0
    with patch("rl_bridge.run.run.time", SimpleNamespace(monotonic=lambda: now)):
        with Run(tmp_path / "run", Config(), checkpoint_every=1) as run:
            for step in run.steps("only", 2, state={}):
                now += 3.0
                if step == 1:
                    break
        now = 5000.0
        with Run(tmp_path / "run", Config(), resume=True) as run:
            for _ in run.steps("only", 2, state={}):
                now += 4.0
            assert run.seconds == 3.0 + 4.0


@pytest.mark.parametrize(
    ("kill_at", "resumed_at"),
    [
        (("first", 3), ("first", 3)),
        (("second", 1), ("second", 0)),
        (("second", 6), ("second", 6)),
    ],
)
def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path, whole, kill_at, resumed_at):
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        go(folder, kill_at=kill_at)
    with pytest.raises(Killed):  # and again, as soon as it is resumed
        go(folder, resume=True, kill_at=resumed_at)
    assert go(folder, resume=True)[0] == resumed_at
    assert metrics(folder) == metrics(whole)
    assert events(folder) == events(whole)
    assert (folder / "summary.json").read_text() == (whole / "summary.json").read_text()


def test_ctrl_c_finishes_the_step_and_leaves_its_checkpoint(tmp_path, whole, capsys):
    folder = tmp_path / "run"
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped, match="stopped after step 2 of 8 of second") as stopped:
        go(folder, interrupt_at=("second", 1))
    assert stopped.value.name == "run"
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopping after this step" in capsys.readouterr().out
    assert not (folder / "summary.json").exists()
    assert go(folder, resume=True)[0] == ("second", 2)
    assert metrics(folder) == metrics(whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_leave_a_checkpoint_as_ctrl_c_does(tmp_path, whole, number):
    folder = tmp_path / "run"
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match="stopped after step 2 of 8 of second") as stopped:
        go(folder, interrupt_at=("second", 1), interrupted_by=number)
    assert stopped.value.number == number and signal.getsignal(number) is before
    assert go(folder, resume=True)[0] == ("second", 2)
    assert metrics(folder) == metrics(whole)


def test_a_signal_that_is_ignored_stays_so(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert len(go(tmp_path / "run", interrupt_at=("second", 1), interrupted_by=signal.SIGHUP)) == 12
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("code", [errno.EIO, errno.EPIPE])
def test_a_terminal_that_is_gone_stops_no_run(tmp_path, code):
    def gone(*_):
        raise OSError(code, "gone")

    with patch("tqdm.tqdm.write", gone), pytest.raises(Stopped):
        go(tmp_path / "run", interrupt_at=("second", 1), interrupted_by=signal.SIGHUP)
    assert (tmp_path / "run" / "checkpoints" / "step-00000006").is_dir()
    code = errno.ENOSPC
    with patch("tqdm.tqdm.write", gone), pytest.raises(OSError, match="gone"):
        go(tmp_path / "other")


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path, whole, capsys):
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        go(folder, kill_at=("first", 1))
    assert go(folder, resume=True)[0] == ("first", 0)
    assert f"{folder} was stopped before its first checkpoint: it begins with the first step" in capsys.readouterr().out
    assert metrics(folder) == metrics(whole)
    assert events(folder) == events(whole)


def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, whole, capsys):
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        go(folder, kill_at=("second", 7))
    newest = folder / "checkpoints" / "step-00000010"
    (newest / "driver" / "state.json").write_text("{")
    assert go(folder, resume=True)[0] == ("second", 3)
    assert f"step-00000007, because {newest / 'driver' / 'state.json'} has 1 bytes" in capsys.readouterr().out
    assert metrics(folder) == metrics(whole)
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"step-00000010", "step-00000012", "step-00000010.damaged"}


def test_a_record_shorter_than_the_checkpoint_knows_is_refused(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        go(folder, kill_at=("second", 7))
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl has 3 bytes, the checkpoint was made after \d+"):
        go(folder, resume=True)


def test_a_lost_checkpoint_does_not_hide_why_the_run_ended(tmp_path):
    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    for kill_at, raised in ((("first", 4), Killed), (None, CheckpointError)):
        with patch.object(step_folders, "commit", fails), pytest.raises(raised) as error:
            go(tmp_path / f"run-{raised.__name__}", every=4, kill_at=kill_at, stages=(("first", 5),))
        said = " ".join([*getattr(error.value, "__notes__", []), str(error.value)])
        assert "No space left on device" in said and "there is no older one" in said


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    with Run(tmp_path / "run", Config()) as run, pytest.raises(KeyboardInterrupt) as raised:
        for _ in run.steps("stage", 3, state={}):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the second one was ignored")
    assert not isinstance(raised.value, Stopped)


def test_a_stage_of_no_steps(tmp_path):
    visited = go(tmp_path / "run", stages=(("first", 0), ("second", 2)))
    assert visited == [("second", 0), ("second", 1)]


def test_a_fact_is_found_out_once_and_outlives_a_kill(tmp_path):
    asked = []

    def find_out():
        asked.append(1)
        return {"scores": (0.1, 1.0), "answer": decimal.Decimal("1.5")}

    def session(*, resume, die_at):
        with Run(tmp_path / "run", Config(), resume=resume, checkpoint_every=1) as run:
            for step in run.steps("stage", 3, state={}):
                assert run.cached_result("before", find_out) == {"scores": [0.1, 1.0], "answer": "1.5"}
                run.log(step, {"reward": 1.0})
                if step == die_at:
                    raise Killed

    for resume, die_at in ((False, 1), (True, 2)):
        with pytest.raises(Killed):
            session(resume=resume, die_at=die_at)
    session(resume=True, die_at=None)
    assert asked == [1]


def test_a_run_overwrites_no_other(tmp_path):
    """USR-19: a folder is taken in the moment in which it is chosen."""
    options = RunOptions(output=tmp_path, name="run")
    assert options.folder() == tmp_path / "run"
    go(tmp_path / "run")
    assert options.folder() == tmp_path / "run-2"
    (tmp_path / "run-3").write_text("a file")
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: options.folder(), range(8)))
    assert folders == {tmp_path / f"run-{number}" for number in range(4, 12)}
    assert dataclasses.replace(options, resume=True).folder() == tmp_path / "run"
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="run exists: go on with --resume, or give this run another --name"):
        Run(tmp_path / "run", Config())
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_nothing_to_resume(tmp_path):
    with pytest.raises(ValueError, match=r"run has no checkpoint to resume from"):
        Run(tmp_path / "run", Config(), resume=True)
    assert not (tmp_path / "run").exists()


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw: no step has one of reward, held_out, "):
        draw_curves([{"stage": "a", "seconds": 1.0, "unknown": 2.0}], tmp_path / "curves.png", title="x")
    assert list(tmp_path.iterdir()) == []


def test_many_points_and_one_panel_are_drawn(tmp_path):
    records = [{"stage": "a", "seconds": float(i), "reward": i / 100} for i in range(100)]
    draw_curves(records, tmp_path / "curves.png", title="x", levels={"reward": 0.3, "absent": 1.0})
    with Image.open(tmp_path / "curves.png") as image:
        image.load()
        assert image.format == "PNG"


def test_the_interval_covers_the_gain_and_only_as_often_as_it_says():
    narrow, wide = (confidence_interval([1.0, 0.0] * n, [0.0, 0.0] * n) for n in (200, 10))
    assert narrow["mean"] == wide["mean"] == 0.5
    assert wide["low"] < narrow["low"] < 0.5 < narrow["high"] < wide["high"]
    assert narrow["high"] - narrow["low"] == pytest.approx(2 * 1.96 * 0.5 / 20, rel=0.1)
    assert confidence_interval([1.0] * 9, [1.0] * 9) == {"mean": 0.0, "low": 0.0, "high": 0.0, "level": 0.95}
    for after, before in (([], []), ([1.0], [1.0, 0.0])):
        with pytest.raises(ValueError, match="need the same rows before and after"):
            confidence_interval(after, before)


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_the_progress_line_is_whole_at_any_width(columns, monkeypatch, tmp_path, capsys):
    """TOOL-10: at 100 columns the line ended in "clip=0.000,", and the speed was never seen."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with Run(tmp_path / "run", Config()) as run:
        for step in run.steps("policy", 20, state={}):
            numbers = dict.fromkeys(("reward", "kl", "entropy", "clip_fraction"), 0.5)
            run.log(step, numbers, tokens=1000)
            line = str(run._bar)
            assert len(line) <= columns, line
        assert "reward=0.500" in line and ("clip=0.500" in line or columns < 100)
        run.finish({"result": "held-out 0 → 1"})
    assert f"run: {tmp_path / 'run'}; to look at it: rl-fn report {tmp_path / 'run'}" in capsys.readouterr().out


class Refuses:
    serves = ()

    def __init__(self, file=None):
        self.file = file

    def started(self, run):
        if self.file is not None:
            (run.folder / self.file).parent.mkdir(exist_ok=True)
            (run.folder / self.file).write_text("mine")
        raise ValueError("weights that are not finite")

    def ended(self, error):
        pass


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("file", [None, "mine.txt", "checkpoints/mine", "events/mine", "skipped/mine"])
def test_a_run_that_fails_before_its_first_step_leaves_nothing_of_its_own_alone(file, before, tmp_path):
    folder = tmp_path / "runs" / "first"
    if before:
        folder.mkdir(parents=True)
    with pytest.raises(ValueError, match="not finite") as refused, Run(folder, Config(), observers=[Refuses(file)]):
        pass
    stays = before or file is not None
    assert folder.exists() == stays and bool(getattr(refused.value, "__notes__", [])) == stays


def test_a_run_that_fails_behind_its_first_record_says_how_to_go_on(tmp_path):
    with pytest.raises(Killed) as refused, Run(tmp_path / "first", Config()) as run:
        for step in run.steps("first", 3, state={}):
            run.log(step, {"reward": 1.0})
            raise Killed
    assert (tmp_path / "first" / "metrics.jsonl").exists() and "--resume" in str(refused.value.__notes__)
