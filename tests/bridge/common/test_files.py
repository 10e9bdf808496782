import json
import os
import shutil

import pytest

from rl_bridge.common.files import replacing, sweep, write_json


def test_a_file_is_replaced_when_it_is_whole(tmp_path):
    path = tmp_path / "new" / "value.json"
    write_json(path, {"a": "é", "path": tmp_path})
    assert json.loads(path.read_text("utf-8")) == {"a": "é", "path": str(tmp_path)}
    with pytest.raises(RuntimeError, match="half"), replacing(path) as temporary:
        temporary.write_text("half")
        assert "é" in path.read_text("utf-8")
        raise RuntimeError("half")
    assert json.loads(path.read_text("utf-8"))["a"] == "é"
    assert [p.name for p in path.parent.iterdir()] == ["value.json"]


def test_a_folder_is_replaced_when_it_is_whole(tmp_path):
    path = tmp_path / "folder"
    for content in ("old", "new"):
        with replacing(path) as temporary:
            temporary.mkdir()
            (temporary / content).write_text(content)
    assert [p.name for p in path.iterdir()] == ["new"]
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.mkdir()
        raise KeyboardInterrupt
    assert [p.name for p in path.iterdir()] == ["new"] and [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_what_a_dead_process_left_is_removed(tmp_path):
    (tmp_path / ".folder.tmp" / "half").mkdir(parents=True)
    (tmp_path / ".file.tmp").write_text("half of a longer text")
    with replacing(tmp_path / "folder") as temporary:
        temporary.mkdir()
        (temporary / "whole").write_text("new")
    with replacing(tmp_path / "file") as temporary:
        assert not temporary.exists()
        temporary.write_text("new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["whole"]


class Killed(BaseException):
    pass


def replace_folder(path, content):
    with replacing(path) as temporary:
        temporary.mkdir()
        (temporary / "weights").write_text(content)


@pytest.mark.parametrize("when", range(11))
def test_killed_at_any_moment_the_old_or_the_new_folder_is_there(tmp_path, monkeypatch, when):
    """Every call that changes names or waits for the disk is a moment; the process dies before it."""
    path = tmp_path / "model"
    replace_folder(path, "old")
    moments = iter(range(100))

    def dying(function):
        def call(*arguments, **options):
            if next(moments) >= when:
                raise Killed
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for module, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (os, "unlink"), (shutil, "rmtree")):
            patch.setattr(module, name, dying(getattr(module, name)))
        try:
            replace_folder(path, "new")
            died = False
        except Killed:
            died = True
    assert died == (when < 10)
    sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert (path / "weights").read_text() in (("old", "new") if died else ("new",))
    replace_folder(path, "newest")
    assert (path / "weights").read_text() == "newest" and [p.name for p in tmp_path.iterdir()] == ["model"]


def test_what_is_new_is_on_the_disk_before_it_has_the_name(tmp_path, monkeypatch):
    seen, fsync, replace = [], os.fsync, os.replace
    path = tmp_path / "model"
    monkeypatch.setattr(
        os, "fsync", lambda number: (seen.append(os.readlink(f"/proc/self/fd/{number}")), fsync(number))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append("renamed"), replace(a, b)))
    replace_folder(path, "new")
    temporary = str(tmp_path / ".model.tmp")
    assert seen == [f"{temporary}/weights", temporary, "renamed", str(tmp_path)]


@pytest.mark.parametrize("content", [None, "kept"])
def test_a_file_never_takes_the_place_of_a_folder(tmp_path, content):
    """`rl-fn report RUN --output runs` removed all runs."""
    (folder := tmp_path / "runs").mkdir()
    if content:
        (folder / "model").write_text(content)
    with pytest.raises(IsADirectoryError, match="runs is a folder"):
        write_json(folder, {})
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
    assert [p.read_text() for p in folder.iterdir()] == ([content] if content else [])
