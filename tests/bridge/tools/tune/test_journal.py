"""A journal after kills and damage."""

import json

import pytest

from rl_tools.tune.journal import Journal, read_journal
from rl_tools.tune.samplers import OptunaSampler, Result
from rl_tools.tune.space import Choice, Interval, Parameter, Space

pytestmark = pytest.mark.long

EVENTS = [
    {"kind": "study"},
    {"kind": "asked", "trial": 0, "assignment": {"rate": 1e-4, "words": "ä\r,\u2028"}},
    {"kind": "x"},
]
SPACE = Space(
    (Parameter("kind", Choice(("a", "b"))), Parameter("x", Interval(0.0, 1.0)), Parameter("y", Interval(0, 1)))
)
CALLS = ["asked 0", "asked 1", "told 1", "asked 2", "told 0", "asked 3", "told 2", "asked 4", "told 3", "asked 5"]


def written(folder):
    journal = Journal(folder / "journal.jsonl")
    for event in EVENTS:
        journal.append(event)
    return folder / "journal.jsonl"


def test_what_was_written_is_read(tmp_path, capfd):
    file = written(tmp_path)
    assert capfd.readouterr() == ("", ""), "Optuna says nothing of its own"
    assert read_journal(file) == (EVENTS, file.stat().st_size)
    assert Journal(file).events == EVENTS


def test_a_torn_last_line_is_cut_off_wherever_it_is_torn(tmp_path):
    file = written(tmp_path)
    content = file.read_bytes()
    last = content.rstrip(b"\n").rindex(b"\n") + 1
    for size in range(last, len(content)):
        file.write_bytes(content[:size])
        journal = Journal(file)
        assert journal.events == EVENTS[:2] and file.stat().st_size == last
    journal.append(EVENTS[2])
    assert read_journal(file) == (EVENTS, file.stat().st_size)


def play(file, name):
    """Every call from where the journal ends, each followed by its event."""
    journal = Journal(file)
    if not journal.events:
        journal.append({"kind": "study"})
    sampler = OptunaSampler(name, SPACE, 3, startup=2, storage=journal.storage)
    assignments = {event["trial"]: event["assignment"] for event in journal.events if event["kind"] == "asked"}
    for call in CALLS[len(journal.events) - 1 :]:
        kind, number = call.split()
        event = {"kind": kind, "trial": (number := int(number))}
        if kind == "asked":
            event["assignment"] = assignments[number] = sampler.ask(number)
        else:
            # Trial 2 fails, and trial 1 breaks its constraint.
            x = assignments[number]["x"]
            sampler.tell(number, Result("failed") if number == 2 else Result("complete", (x,), (1.5 - number,)))
        journal.append(event)
    return journal


@pytest.mark.parametrize("name", ["random", "grid", "tpe", "cma-es"])
def test_a_kill_behind_any_line_and_in_its_middle_changes_nothing(name, tmp_path):
    """Optuna writes a trial in many lines. Cut anywhere, the study goes on as if it had not been."""
    file = tmp_path / "journal.jsonl"
    undisturbed = play(file, name)
    states = [(trial.state, trial.params) for trial in undisturbed.storage.get_all_trials(0)]
    lines = file.read_bytes().splitlines(keepends=True)
    for count, line in enumerate(lines):
        file.write_bytes(b"".join(lines[:count]) + line[: count % 7 * len(line) // 7])
        again = play(file, name)
        assert again.events == undisturbed.events, f"killed in line {count}"
        assert [(trial.state, trial.params) for trial in again.storage.get_all_trials(0)] == states


def test_a_changed_line_is_damage_and_says_where(tmp_path):
    file = written(tmp_path)
    file.write_bytes(file.read_bytes().replace(b"0.0001", b"0.0002"))
    # Line 1 is Optuna's: the study.
    with pytest.raises(ValueError, match=r"journal.jsonl, line 3 is damaged"):
        Journal(file)
    [sealed] = json.loads(file.read_bytes().splitlines()[2])["user_attr"].values()
    assert sealed["event"]["assignment"]["rate"] == 2e-4, "nothing was changed"


@pytest.mark.parametrize("lines", [1, 2, 1.5])
def test_a_study_of_an_earlier_version_is_refused_by_name_and_kept(tmp_path, lines):
    file, line = tmp_path / "journal.jsonl", b'{"crc32": 1, "event": {"kind": "study"}}\n'
    file.write_bytes(content := (line + line)[: int(lines * len(line))])
    with pytest.raises(ValueError, match=r"journal.jsonl is of an earlier version.* another --name"):
        Journal(file)
    assert file.read_bytes() == content


def test_a_line_that_is_gone_or_is_none_is_damage(tmp_path):
    file = written(tmp_path)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], lines[3], lines[3]]))
    with pytest.raises(ValueError, match="line 3 is damaged"):
        Journal(file)
    for other in (b"5\n", b'{"crc32": 1, "event": {"kind": "told"}}\n'):
        file.write_bytes(b"".join([lines[0], other, *lines[1:]]))
        with pytest.raises(ValueError, match="line 2 is damaged"):
            Journal(file)
