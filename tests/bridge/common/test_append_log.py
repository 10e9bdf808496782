"""A log of JSON lines: what was whole stays, what was torn goes, whoever writes at the same time."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from filelock import lock_descriptor, unlock_descriptor
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.common import append_log
from rl_bridge.common.append_log import AppendLog, read_log, whole_lines

VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
RECORDS = st.dictionaries(st.text(), VALUES | st.lists(VALUES, max_size=2), max_size=3)


def added(file, *records):
    with AppendLog(file) as log:
        return [log.append(record) for record in records]


@pytest.mark.long
@given(data=st.data(), before=st.lists(RECORDS, max_size=6), after=st.lists(RECORDS, min_size=1, max_size=3))
def test_a_log_that_was_cut_anywhere_has_its_whole_lines_and_the_new_ones(tmp_path_factory, data, before, after):
    """What a killed writer leaves is a part of what it wrote."""
    file = tmp_path_factory.mktemp("log") / "lines.jsonl"
    lines = added(file, *before)
    content = file.read_bytes()
    assert content == b"".join(lines) and read_log(file) == before
    size = data.draw(st.integers(0, len(content)))
    file.write_bytes(content[:size])
    whole = before[: content[:size].count(b"\n")]
    assert read_log(file) == whole
    added(file, *after)
    assert read_log(file) == whole + after
    assert file.read_bytes() == b"".join(
        lines[: len(whole)] + [line + b"\n" for line in whole_lines(file)][len(whole) :]
    )


@pytest.mark.parametrize("chunk", [1, 7, 1 << 16])
def test_a_torn_line_may_be_longer_than_what_is_read_at_once(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(append_log, "_CHUNK", chunk)
    file = tmp_path / "lines.jsonl"
    for whole in (b"", b'{"a": 1}\n'):
        file.write_bytes(whole + b'{"b": "' + b"x" * 100)
        added(file, {"c": 2})
        assert file.read_bytes() == whole + b'{"c": 2}\n'


@pytest.mark.parametrize("damaged", [b"{", b'{"a": "\xff"}', b"[1]", b"", b"\x00"])
def test_a_damaged_line_is_named_wherever_it_is(tmp_path, damaged):
    file = tmp_path / "lines.jsonl"
    for place in range(3):
        lines = [b"{}"] * 3
        lines[place] = damaged
        file.write_bytes(b"\n".join([*lines, b'{"torn']))
        with pytest.raises(ValueError, match=rf"lines\.jsonl, line {place + 1} is damaged: b"):
            read_log(file)


def test_there_may_be_no_log(tmp_path):
    assert read_log(tmp_path / "none.jsonl") == [] and not (tmp_path / "none.jsonl").exists()


def test_a_link_is_not_followed(tmp_path):
    (victim := tmp_path / "victim").write_text("kept")
    (tmp_path / "lines.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        AppendLog(tmp_path / "lines.jsonl")
    assert victim.read_text() == "kept"


def test_a_full_disk_leaves_a_torn_line_that_the_next_one_replaces(tmp_path, monkeypatch):
    file, write = tmp_path / "lines.jsonl", os.write
    log = AppendLog(file)
    log.append({"a": 1})
    with monkeypatch.context() as patch:
        parts = iter([5])

        def full(descriptor, part):
            for size in parts:
                return write(descriptor, part[:size])
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            log.append({"lost": 2})
    assert file.read_bytes() == b'{"a": 1}\n{"los' and read_log(file) == [{"a": 1}]
    log.append({"b": 3})
    assert read_log(file) == [{"a": 1}, {"b": 3}]
    log.close()


def test_a_write_may_take_a_part_at_a_time(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, part: write(descriptor, part[:3]))
    added(tmp_path / "lines.jsonl", {"a": "long enough"}, {"b": 2})
    assert read_log(tmp_path / "lines.jsonl") == [{"a": "long enough"}, {"b": 2}]


@pytest.mark.parametrize("share", [False, True], ids=["a log each", "one log of all threads"])
def test_several_may_add_at_the_same_time(tmp_path, share):
    file = tmp_path / "lines.jsonl"
    shared = AppendLog(file)

    def write(name):
        for number in range(40):
            record = {"of": name, "number": number, "long": "x" * 5000}
            shared.append(record) if share else added(file, record)

    with shared, ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    records = read_log(file)
    assert len(records) == 160
    for name in range(4):
        assert [record["number"] for record in records if record["of"] == name] == list(range(40))


def test_nobody_takes_the_line_that_another_one_is_writing_for_a_torn_one(tmp_path, monkeypatch):
    file, waits = tmp_path / "lines.jsonl", threading.Event()

    def lock(*arguments, **options):
        waits.set()
        return lock_descriptor(*arguments, **options)

    monkeypatch.setattr(append_log, "lock_descriptor", lock)
    other = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    lock_descriptor(other)
    os.write(other, b'{"of": "the ')
    second = threading.Thread(target=added, args=(file, {"of": "second"}))
    second.start()
    assert waits.wait(60)
    os.write(other, b'first"}\n')
    unlock_descriptor(other)
    second.join(60)
    os.close(other)
    assert read_log(file) == [{"of": "the first"}, {"of": "second"}]


def test_a_log_of_so_many_bytes_and_no_more(tmp_path):
    file = tmp_path / "lines.jsonl"
    with AppendLog(file) as log:
        line = log.append({"a": 1}, most=9)
        assert line == b'{"a": 1}\n' and log.append({"b": 2}, most=17) == b"" and log.append({"b": 2}, most=18)
    file.write_bytes(file.read_bytes() + b'{"torn": ')
    with AppendLog(file) as log:
        assert log.append({"c": 3}, most=26) == b"" and log.append({"c": 3}, most=27)


def test_cut_sync_and_close(tmp_path):
    log = AppendLog(tmp_path / "lines.jsonl")
    log.append({"a": 1})
    assert log.sync() == 9
    log.append({"b": 2})
    log.cut(9)
    assert log.sync() == 9 and read_log(tmp_path / "lines.jsonl") == [{"a": 1}]
    log.close()
    log.close()
    with pytest.raises(ValueError, match="the log is closed"):
        log.append({})
