"""Whole or not at all, the last few, and what is wrong with a damaged one, by the name of the file."""

import json
import re
from unittest.mock import patch

import pytest

from rl_bridge.checkpoints import Checkpointer
from rl_bridge.common import step_folders


class Killed(BaseException):
    pass


def save(folder, step, content="weights", *, keep=2):
    path = step_folders.path_of(folder, step)
    temporary = step_folders.begin(path, ["part"])
    (temporary / "part" / "shard").write_text(content * 100)
    step_folders.commit(path, step_folders.records(temporary), {"step": step}, keep=keep)
    return path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_are_kept_in_the_order_of_their_steps(tmp_path):
    for step in (2, 10, 99_999_999, 100_000_000):
        path = save(tmp_path, step)
        assert step_folders.damage(path) is None
        assert step_folders.read_manifest(path)["step"] == step
    assert names(tmp_path) == ["step-100000000", "step-99999999"]
    assert [step_folders.step_of(path) for path in step_folders.checkpoints(tmp_path)] == [99_999_999, 100_000_000]
    save(tmp_path, 100_000_001, keep=1)
    assert names(tmp_path) == ["step-100000001"]


@pytest.mark.parametrize("pinned", [(), (1,), (2, 5, 21)])
@pytest.mark.parametrize("keep", range(1, 21))
def test_after_every_save_the_newest_are_there_and_the_pinned_and_no_other(tmp_path, keep, pinned, monkeypatch):
    """ENG-7: with 4 and more to be kept, the first saves of a run deleted what was to stay."""
    monkeypatch.setattr(step_folders, "sync_folder", lambda folder: None)  # the disk's wait is not what this is about
    monkeypatch.setattr(step_folders.os, "fsync", lambda descriptor: None)
    for step in range(1, 24):
        path = step_folders.path_of(tmp_path, step)
        step_folders.begin(path, [])
        step_folders.commit(path, {}, {"step": step}, keep=keep, pinned=pinned)
        there = [step_folders.step_of(path) for path in step_folders.checkpoints(tmp_path)]
        assert there == [s for s in range(1, step + 1) if s > step - keep or s in pinned]


def test_pinned_steps_stay_however_old(tmp_path):
    for step in range(1, 7):
        path = step_folders.path_of(tmp_path, step)
        (step_folders.begin(path, []) / "shard").write_text("x")
        step_folders.commit(path, {}, {"step": step}, keep=2, pinned=(2,) if step < 6 else (5,))
    assert names(tmp_path) == ["step-00000005", "step-00000006"]
    save(tmp_path, 7)
    path = step_folders.path_of(tmp_path, 8)
    step_folders.begin(path, [])
    step_folders.commit(path, {}, {"step": 8}, keep=1, pinned=(6,))
    assert names(tmp_path) == ["step-00000006", "step-00000008"]


def test_the_same_step_again_takes_the_place_of_the_first(tmp_path):
    save(tmp_path, 3, "old")
    path = save(tmp_path, 3, "new")
    assert (path / "part" / "shard").read_text().startswith("new") and names(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("when", range(12))
def test_killed_at_any_moment_an_old_or_a_new_one_is_whole(tmp_path, when):
    """Every call that changes a folder's names is a moment; the process dies before it."""
    for step in (1, 2):
        save(tmp_path, step)
    moments = iter(range(100))

    def dying(function):
        def call(*arguments, **options):
            if next(moments) == when:
                raise Killed
            return function(*arguments, **options)

        return call

    with (
        patch.object(step_folders.os, "rename", dying(step_folders.os.rename)),
        patch.object(step_folders.shutil, "rmtree", dying(step_folders.shutil.rmtree)),
        patch.object(step_folders.os, "fsync", dying(step_folders.os.fsync)),
    ):
        try:
            save(tmp_path, 3)
            died = False
        except Killed:
            died = True
    assert died == (when < 8)
    whole = step_folders.checkpoints(tmp_path)
    assert whole and all(step_folders.damage(path) is None for path in whole)
    assert step_folders.step_of(whole[-1]) in (2, 3)
    save(tmp_path, 4)  # and nothing of the dead process is left
    assert names(tmp_path) == sorted([whole[-1].name, "step-00000004"])


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("file", ["part/shard", "manifest.json"])
@pytest.mark.parametrize(
    ("damaging", "message"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:50]), "has 50 bytes, 700 were written|cannot be read"),
        (lambda file: file.write_bytes(b""), "has 0 bytes, 700 were written|cannot be read"),
        (flip, "has another checksum than was written|cannot be read|is missing"),
    ],
)
def test_damage_is_named_with_its_file(tmp_path, file, damaging, message):
    path = save(tmp_path, 5)
    damaging(path / file)
    reason = step_folders.damage(path)
    assert reason is not None and reason.startswith(str(path / file)) and re.search(message, reason)


def test_every_flipped_bit_of_a_manifest_is_seen(tmp_path):
    path = save(tmp_path, 5)
    file = path / "manifest.json"
    content = file.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 4
        file.write_bytes(changed)
        assert step_folders.damage(path) is not None, place
    file.write_bytes(content)
    assert step_folders.damage(path) is None


@pytest.mark.parametrize("changed", [False, True], ids=["our checksum", "another checksum"])
def test_usr_22_another_format_is_refused_and_never_set_aside(tmp_path, changed):
    save(tmp_path, 5)
    with patch.object(step_folders, "FORMAT", 2):
        path = save(tmp_path, 6)
        if changed:
            manifest = json.loads((path / "manifest.json").read_text())
            (path / "manifest.json").write_text(json.dumps({**manifest, "files": [], "crc32": "new"}))
    checkpointer = Checkpointer(tmp_path, report=pytest.fail)
    for look in (checkpointer.latest, lambda: checkpointer.read(path), lambda: step_folders.damage(path)):
        with pytest.raises(ValueError, match=r"manifest\.json is of format 2, this version reads format 1: go on with"):
            look()
    checkpointer._set_damaged_aside()
    assert path.is_dir() and not list(tmp_path.glob("*.damaged"))


def test_a_damaged_one_is_set_aside(tmp_path):
    for content in ("first", "second"):
        aside = step_folders.set_aside(save(tmp_path, 7, content))
        assert (aside / "part" / "shard").read_text().startswith(content)
    assert names(tmp_path) == ["step-00000007.damaged"] and step_folders.checkpoints(tmp_path) == []


def test_what_is_json_stays_readable(tmp_path):
    record = step_folders.write_json(tmp_path / "x.json", {"a": [1, 2.5, None]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [1, 2.5, None]}
    assert record == step_folders.record_of(tmp_path / "x.json")
