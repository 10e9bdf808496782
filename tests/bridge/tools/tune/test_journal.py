"""A journal after kills and damage."""

import json

import pytest

from rl_tools.tune.journal import Journal, read_journal

EVENTS = [
    {"kind": "study"},
    {"kind": "asked", "trial": 0, "assignment": {"rate": 1e-4, "words": "ä\r,\u2028"}},
    {"kind": "x"},
]


def written(folder):
    journal = Journal(folder / "journal.jsonl")
    for event in EVENTS:
        journal.append(event)
    journal.close()
    return folder / "journal.jsonl"


def test_what_was_written_is_read(tmp_path):
    file = written(tmp_path)
    assert read_journal(file) == (EVENTS, file.stat().st_size)
    assert Journal(file).events == EVENTS


def test_a_torn_last_line_is_cut_off_wherever_it_is_torn(tmp_path):
    file = written(tmp_path)
    content = file.read_bytes()
    second = content.index(b"\n", content.index(b"\n") + 1) + 1
    for size in range(second, len(content)):
        file.write_bytes(content[:size])
        journal = Journal(file)
        assert journal.events == EVENTS[:2] and file.stat().st_size == second
        journal.append(EVENTS[2])
        journal.close()
        assert file.read_bytes() == content


def test_a_changed_line_is_damage_and_says_where(tmp_path):
    file = written(tmp_path)
    file.write_bytes(file.read_bytes().replace(b"0.0001", b"0.0002"))
    with pytest.raises(ValueError, match=r"journal.jsonl, line 2 is damaged"):
        Journal(file)
    assert json.loads(file.read_bytes().splitlines()[1])["event"]["assignment"]["rate"] == 2e-4, "nothing was changed"
