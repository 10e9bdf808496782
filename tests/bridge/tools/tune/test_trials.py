"""Studies of real processes: kills at random places, crashes, hangs, Ctrl-C, orphans."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import optuna
import pytest

from rl_bridge.common.files import RunLock
from rl_tools.tune.goals import parse_goal
from rl_tools.tune.journal import Key, read_journal
from rl_tools.tune.scheduler import Scheduler
from rl_tools.tune.study import last_lines, places, run_study, training_command
from rl_tools.tune.study_report import read_study, summary_of
from tests.bridge.tools.tune.tuner import study_of
from tests.support.processes import gone

pytestmark = pytest.mark.long

TUNER = Path(__file__).with_name("tuner.py")
ROOT = Path(__file__).parents[4]


def tuner(output=Path(os.devnull), **options):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "bridge"))}
    environment["OPENBLAS_NUM_THREADS"] = "1"
    words = [sys.executable, str(TUNER), json.dumps(options, default=str)]
    with output.open("w") as stream:
        return subprocess.Popen(words, env=environment, stdout=stream, stderr=subprocess.DEVNULL, process_group=0)


def starts(folder):
    """(Process, steps that were done before) of every start of every run."""
    lines = [line.split() for file in sorted(folder.glob("runs/*/starts")) for line in file.read_text().splitlines()]
    return [(int(process), int(done)) for process, done in lines]


def wait_for(condition, what, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} after {seconds} s"
        time.sleep(0.01)


def events(folder, kind):
    return [event for event in read_journal(folder / "journal.jsonl")[0] if event["kind"] == kind]


def lines(file):
    return file.read_bytes().splitlines() if file.exists() else []


def whole(folder, trials, seeds):
    """Every run came to its end once, and the journal has each trial's end once."""
    ended = [event for event in events(folder, "ended") if event["status"] == "complete"]
    assert len(ended) == len({(event["trial"], event["seed"]) for event in ended}) == trials * seeds
    told = sorted(events(folder, "told"), key=lambda event: event["trial"])
    assert [event["trial"] for event in told] == list(range(trials))
    # Optuna itself reads the same.
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / "journal.jsonl")))
    found = optuna.load_study(study_name="tune", storage=storage).trials
    assert [(trial.state.name, trial.values) for trial in found] == [("COMPLETE", event["losses"]) for event in told]
    for run in folder.glob("runs/*"):
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        # A step whose checkpoint a kill took is made again, by our trainers too.
        assert sorted(set(steps)) == list(range(max(steps) + 1))
    assert all(gone(process) for process, _ in starts(folder))


def has_come_to(enough, journal, process):
    return len(lines(journal)) >= enough or process.poll() is not None


@pytest.mark.parametrize("kills", [4, pytest.param(25, marks=pytest.mark.slow)])
def test_sigkill_of_the_tuner_and_of_workers_loses_nothing_and_repeats_nothing(tmp_path, kills):
    """Killed as soon as its journal has grown by some lines: between any two of them, and in trials of all ages."""
    folder, generator = tmp_path / "study", random.Random(kills)
    options = {"folder": folder, "trials": 3, "seeds": 2, "slots": 2, "steps": 6, "pause": 0.05 if kills < 9 else 0.2}
    journal, finished = folder / "journal.jsonl", {}
    for number in range(kills):
        enough = len(lines(journal)) + generator.randint(1, 60 // kills + 1)
        process = tuner(**options, resume=number > 0)
        wait_for(partial(has_come_to, enough, journal, process), "progress")
        if number % 2:
            for victim, _ in starts(folder)[-1:]:  # a worker too
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
        process.kill()
        process.wait()
        with journal.open("ab") as torn:
            torn.write(b'{"op_code":2,"worker_id":"'[: generator.randrange(20)])  # the machine was killed, too
        for told in events(folder, "told"):
            assert finished.setdefault(told["trial"], told) == told
    process = tuner(**options, resume=True)
    assert process.wait(timeout=60) == 0
    whole(folder, 3, 2)
    for told in events(folder, "told"):
        assert finished.get(told["trial"], told) == told


@pytest.mark.timeout(120)
def test_crash_hang_kill_and_a_good_end_in_one_study(tmp_path, monkeypatch):
    """An hour is over as soon as nothing runs but what hangs, however long the others take."""
    folder, limit = tmp_path / "study", Scheduler._limit

    def an_hour_later(self, now):
        left = [self.state.trials[key.trial].assignment["fail"] for key, _ in self.state.with_status("running")]
        limit(self, now + 3600 * (set(left) == {"hang"}))

    monkeypatch.setattr(Scheduler, "_limit", an_hour_later)
    fails = ("no", "crash", "hang", "kill")
    run_study(study_of(folder, fails=fails, trials=9, slots=4, time_limit=3600.0, grace=0.2, devices=("5", "7")))
    found = summary_of(read_study(folder))
    kinds = {trial["assignment"]["fail"]: trial for trial in found["trials"]}
    assert set(kinds) == {"no", "crash", "hang", "kill"}
    assert kinds["no"]["status"] == kinds["kill"]["status"] == "complete"
    assert "ValueError: x = " in kinds["crash"]["reason"] and kinds["crash"]["reason"].startswith("exit status 1")
    assert kinds["hang"]["reason"] == "had not ended after 3600 s"
    again = [e for e in events(folder, "ended") if e["status"] == "interrupted"]
    assert again and {e["reason"] for e in again} == {"killed by signal 9"}
    assert all(gone(process) for process, _ in starts(folder))
    devices = [json.loads(file.read_text())["device"] for file in folder.glob("runs/*/summary.json")]
    assert set(devices) <= {"5", "7"} and devices


def to_itself(process, number):
    process.send_signal(number)


def to_its_group(process, number):
    """As a terminal sends Ctrl-C: to the command and all that it started but what has a session of its own."""
    os.killpg(process.pid, number)


SENT = [(signal.SIGINT, to_itself), (signal.SIGINT, to_its_group), (signal.SIGTERM, to_itself)]


@pytest.mark.parametrize(("number", "sent"), [*SENT, (signal.SIGHUP, to_itself)])
def test_a_signal_stops_all_and_a_later_tuner_goes_on_from_the_checkpoints(tmp_path, number, sent):
    folder = tmp_path / "study"
    options = {"folder": folder, "fails": ["wait", "wait "], "trials": 2, "seeds": 1, "slots": 2, "steps": 12}
    process = tuner(**options)
    wait_for(lambda: len(list(folder.glob("runs/*/state.json"))) == 2, "checkpoints")
    sent(process, number)
    assert process.wait(timeout=20) == 128 + number
    assert (folder / "printed").read_text() == "stopped after 0 of 2 trials"
    assert all(gone(process, 0.5) for process, _ in starts(folder))
    # SIGTERM, and time to answer it, whichever signal the study got.
    assert {(event["status"], event["exit"]) for event in events(folder, "ended")} == {("interrupted", 143)}
    assert {event["reason"] for event in events(folder, "ended")} == {"the study was stopped"}
    assert tuner(**options, resume=True).wait(timeout=30) == 0
    whole(folder, 2, 1)
    again = [done for _, done in starts(folder)]
    assert len(again) == 4 and sum(done > 0 for done in again) == 2


@pytest.mark.parametrize(("number", "sent"), SENT)
def test_a_second_signal_waits_for_no_trial_and_loses_none_that_ended(tmp_path, number, sent):
    folder, output = tmp_path / "study", tmp_path / "output"
    # The grace is longer than the test may take: runs that are deaf to SIGTERM end by the second signal alone.
    options = {"folder": folder, "fails": ["no", "stuck"], "trials": 4, "slots": 4, "grace": 3600.0}
    process = tuner(output, **options)
    wait_for(lambda: len(events(folder, "told")) + len(list(folder.glob("runs/*/stuck"))) == 4, "runs that hang")
    ended, begun = events(folder, "told"), starts(folder)
    assert 0 < len(ended) < 4
    sent(process, number)
    wait_for(lambda: "stopping after this step" in output.read_text(), "answer")
    assert process.poll() is None, "the first signal waits for the runs"
    sent(process, number)
    assert process.wait(timeout=20) == 128 + number
    words = f"{len(ended)} of 4 trials have ended; go on with the same command and --name study --resume"
    assert (folder / "printed").read_text() == words, "as the message of one signal says"
    assert all(gone(each, 0.5) for each, _ in begun) and starts(folder) == begun
    assert not list(folder.rglob("*.tmp")) and events(folder, "told") == ended
    assert tuner(output, **options, resume=True).wait(timeout=30) == 0
    whole(folder, 4, 1)
    assert len(starts(folder)) == 4 + 4 - len(ended), "those that ended are left alone"


def test_a_tuner_that_is_killed_takes_its_trials_along_even_deaf_ones(tmp_path):
    folder = tmp_path / "study"
    process = tuner(folder=folder, fails=["hang", "hang "], trials=1, slots=1, grace=0.2)
    wait_for(lambda: list(folder.glob("runs/*/metrics.jsonl")) and starts(folder), "start")
    process.kill()
    process.wait()
    assert all(gone(process, 5.0) for process, _ in starts(folder))


def test_a_run_does_not_outlive_its_guard_and_its_tuner_and_is_gone_on_with(tmp_path):
    """Neither leaves an exit status."""
    folder = tmp_path / "study"
    options = {"folder": folder, "trials": 1, "slots": 1, "steps": 30, "pause": 0.05, "grace": 30.0}
    process = tuner(**options)
    wait_for(lambda: list(folder.glob("runs/*/state.json")), "checkpoint")
    [(trial, _)] = starts(folder)
    guard = int(Path(f"/proc/{trial}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(guard, signal.SIGSTOP)  # it cannot answer that the tuner is gone
    process.kill()
    process.wait()
    os.kill(guard, signal.SIGKILL)
    assert gone(trial, 5.0) and not list(folder.glob("logs/*.exit"))
    assert tuner(**options, resume=True).wait(timeout=30) == 0
    whole(folder, 1, 1)
    assert [done > 0 for _, done in starts(folder)] == [False, True]


def test_a_later_tuner_waits_until_the_runs_of_the_earlier_one_have_ended(tmp_path):
    """A guard of its own would find the run locked, and the study would take that for a kill."""
    folder = tmp_path / "study"
    options = {"folder": folder, "trials": 1, "slots": 1, "steps": 3, "pause": 0.8, "grace": 30.0}
    process = tuner(**options)
    wait_for(lambda: starts(folder), "start")
    process.kill()
    process.wait()
    assert not gone(starts(folder)[0][0], 0.0), "the run finishes its step"
    assert tuner(**options, resume=True).wait(timeout=30) == 0
    whole(folder, 1, 1)
    interrupted = [event for event in events(folder, "ended") if event["status"] == "interrupted"]
    assert [event["counts"] for event in interrupted] == [0] and len(starts(folder)) == 2


def test_two_tuners_and_another_study_are_refused(tmp_path):
    study = study_of(tmp_path / "study", trials=1)
    run_study(study)
    with pytest.raises(ValueError, match="exists: go on with --resume, or give this study another --name"):
        run_study(study)
    with pytest.raises(ValueError, match=r"is another study: steps was 4 and is 5\. Give this one another --name"):
        run_study(study_of(tmp_path / "study", trials=1, steps=5), resume=True)
    with pytest.raises(ValueError, match=r"there is no study in .* to resume"):
        run_study(study_of(tmp_path / "other"), resume=True)
    before = read_study(tmp_path / "study")
    held = RunLock(tmp_path / "study")
    with pytest.raises(ValueError, match="study is in use by "):
        run_study(study, resume=True)
    held.release()
    assert run_study(study, resume=True) == before, "a study at its end does nothing more"
    assert len(run_study(study_of(tmp_path / "study", trials=2), resume=True)) > len(before), "or a few trials more"


def test_places():
    cores = len(os.sched_getaffinity(0))
    assert [place.device for place in places(3, devices=["0", "1"])] == ["0", "1", "0"]
    assert places(1, pin=True)[0].threads == cores == len(places(1, pin=True)[0].cores)
    with pytest.raises(ValueError, match="cannot be divided among"):
        places(cores + 1, pin=True)


def test_the_command_of_a_repetition_has_its_seed():
    command = training_command("sft", lambda values: [f"--x={values['x']}"], first_seed=100)
    made = command(Key(3, 2), {"x": 1}, Path("runs"), True)
    assert " ".join(made[3:]) == "train sft --x=1 --seed 102 --name trial-0003-seed-2 --output runs --resume"
    assert command(Key(3, 2), {"x": 1}, Path("runs"), False) == made[:-1]


def test_the_last_lines_of_a_log_without_progress_bars(tmp_path):
    (tmp_path / "log").write_text("a\nb\n 10%|#\r 20%|##\rdone\n\nValueError: no\n")
    assert last_lines(tmp_path / "log") == "b | done | ValueError: no"
    assert last_lines(tmp_path / "none") == ""


def test_a_misspelt_goal_ends_the_study_at_its_first_trial(tmp_path):
    """TOOL-8: with near names, and not after all trials have run."""
    study = study_of(tmp_path / "study", trials=4, slots=1)
    study = replace(study, plan=replace(study.plan, goals=(parse_goal("rewart", maximize=True),)))
    with pytest.raises(ValueError, match=r"no record and no summary has rewart; did you mean reward\?"):
        run_study(study)
    assert [path.name for path in (tmp_path / "study/runs").iterdir()] == ["trial-0000-seed-0"]
