import json

import pytest

from rl_bridge.atomic import replacing, write_json


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
