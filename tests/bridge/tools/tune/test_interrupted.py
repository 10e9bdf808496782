"""A study of the real trainer that is interrupted in the middle of a run ends as the one that never was."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from rl_bridge.run.records import METRICS, read_records
from rl_tools.cli import main
from rl_tools.tune.study_report import read_study
from tests.support import warm
from tests.support.processes import gone

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[4]
STEPS, REACHED = 100, 30
NEVER = 10_000
TINY = {"steps": STEPS, "rows-per-step": 1, "evaluate-every": NEVER, "held-out": 4, "threads": 1}
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 20) for b in range(10, 20)]
# The second trial is the one that is interrupted, after the first has ended.
WORDS = ["sft", "--space.optimizer.learning-rate", "log:1e-4..1e-2", "--trials", "2", "--minimize", "held_out_nll"]
WORDS += ["--minimize", "tokens", *(word for name, value in TINY.items() for word in (f"--{name}", str(value)))]
SECOND = "trial-0001-seed-0"


# As a terminal starts a command: the leader of a group of its own, which gets Ctrl-C.
TUNER = "import os, sys; os.setsid(); from rl_tools.cli import main; sys.exit(main(sys.argv[1:]))"


def tuner(folder, every):
    """``rl-fn tune`` in a process that has imported everything; its trainers begin as they do for a user."""
    path = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "bridge"))
    return warm.start("-c", TUNER, "tune", *words_of(folder, every), PYTHONPATH=path)


def words_of(folder, every):
    rows = folder.with_name("rows.jsonl")
    rows.write_text("\n".join(map(json.dumps, ROWS)))
    places = ["--data", str(rows), "--name", folder.name, "--output", str(folder.parent)]
    return [*WORDS, "--checkpoint-every", str(every), *places]


def records(folder):
    """Of the second run."""
    file = folder / "runs" / SECOND / METRICS
    return read_records(file) if file.exists() else []


def processes_of(folder):
    """Process → session of all whose command line names the study's folder: guards and trainers."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder / "runs").encode() in (process / "cmdline").read_bytes():
                found[int(process.name)] = os.getsid(int(process.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def interrupt(process, how, running):
    if how == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
        return
    process.kill()
    if how == "power cut":
        for session in set(running.values()):
            os.killpg(session, signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A study that nobody interrupts, in processes of its own beside the one that is."""
    folder = tmp_path_factory.mktemp("undisturbed") / "study"
    process = tuner(folder, NEVER)
    yield folder, process
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    "how",
    [
        "Ctrl-C",
        pytest.param("SIGKILL", marks=pytest.mark.slow),
        pytest.param("power cut", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_study_ends_as_one_that_never_was(how, tmp_path, undisturbed):
    """With Ctrl-C or a SIGKILL of the tuner the run in its middle writes the only checkpoint there is.

    When all processes are killed at once, the run goes on from its last periodic checkpoint.
    """
    folder, every = tmp_path / "study", 20 if how == "power cut" else NEVER
    process = tuner(folder, every)
    deadline = time.monotonic() + 240
    while len(records(folder)) < REACHED:
        assert process.poll() is None and time.monotonic() < deadline, f"the second run has made no {REACHED} steps"
        time.sleep(0.01)
    running = processes_of(folder)
    assert len(running) == 2, "a guard and a trainer"
    interrupt(process, how, running)
    status = process.wait(timeout=60)
    if how == "Ctrl-C":
        assert status == 130 and "stopped after 1 of 2 trials" in "".join(process.outputs())
        assert all(gone(number, 0.5) for number in running), "Ctrl-C returns when all have ended"
    assert all(gone(number) for number in running) and not processes_of(folder)
    made, before = len(records(folder)), read_study(folder)
    assert made < STEPS and [event["trial"] for event in before if event["kind"] == "told"] == [0]
    first = (folder / "runs/trial-0000-seed-0" / METRICS).stat()

    assert main(["tune", *words_of(folder, every), "--resume"]) == 0
    after = read_study(folder)
    assert after[: len(before)] == before, "what is in the journal stays"
    assert (folder / "runs/trial-0000-seed-0" / METRICS).stat() == first, "a finished run is left alone"
    starts = [event["trial"] for event in after if event["kind"] == "started"]
    assert starts == [0, 1, 1] and not processes_of(folder)
    # The record has each step once, and says in which attempt.
    steps, attempts = zip(*((record["step"], record["attempt"]) for record in records(folder)), strict=True)
    again = attempts.index(2)
    assert steps == tuple(range(STEPS))
    assert again == made if how != "power cut" else 0 < again <= made and again % every == 0
    assert f"going on from step-{again:08d}" in (folder / f"logs/{SECOND}.log").read_text("utf-8")

    other, process = undisturbed
    assert process.wait(timeout=240) == 0
    results = [[event for event in read_study(each) if event["kind"] in ("asked", "told")] for each in (other, folder)]
    assert results[0] == results[1] and [event["status"] for event in results[0][1::2]] == ["complete"] * 2
