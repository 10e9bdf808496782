import json
import random

import numpy as np
import pytest
import torch

from rl_bridge.atomic import replacing, write_json
from rl_bridge.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint


def test_a_checkpoint_gives_back_tensors_numbers_and_random_states(tmp_path):
    tensor = torch.randn(3)
    random.random(), np.random.normal(), torch.randn(2)
    path = save_checkpoint(tmp_path, 7, {"weights": tensor, "note": {"list": [1, 2.5, "x", None]}})
    drawn = random.random(), np.random.normal(), torch.randn(2).tolist(), random.gauss(0, 1)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    state = load_checkpoint(path)
    assert torch.equal(state["weights"], tensor) and state["note"] == {"list": [1, 2.5, "x", None]}
    assert state["step"] == 7 and path.name == "step-00000007"
    assert (random.random(), np.random.normal(), torch.randn(2).tolist(), random.gauss(0, 1)) == drawn


def test_the_newest_is_found_and_the_oldest_are_dropped(tmp_path):
    assert latest_checkpoint(tmp_path / "absent") is None
    for step in (2, 10, 9):
        save_checkpoint(tmp_path, step, {}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000009", "step-00000010"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000010"


def test_a_half_written_checkpoint_is_ignored_and_cleared_by_the_next(tmp_path):
    save_checkpoint(tmp_path, 3, {"x": 1})
    left = tmp_path / ".step-00000006.4242.tmp"
    left.mkdir()
    (left / "state.pt").write_bytes(b"half")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000003"
    save_checkpoint(tmp_path, 6, {"x": 2})
    assert not left.exists()
    assert load_checkpoint(tmp_path / "step-00000006")["x"] == 2


def test_an_unreadable_checkpoint_names_its_file(tmp_path):
    path = save_checkpoint(tmp_path, 1, {})
    whole = (path / "state.pt").read_bytes()
    for content in (b"", b"no checkpoint", whole[: len(whole) // 2]):
        (path / "state.pt").write_bytes(content)
        with pytest.raises(ValueError, match=r"step-00000001/state\.pt cannot be read"):
            load_checkpoint(path)
    (path / "state.pt").unlink()
    with pytest.raises(ValueError, match=r"step-00000001/state\.pt cannot be read"):
        load_checkpoint(path)


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def test_a_checkpoint_executes_nothing(tmp_path, capsys):
    path = save_checkpoint(tmp_path, 1, {"x": Evil()})
    with pytest.raises(ValueError, match="cannot be read"):
        load_checkpoint(path)
    assert "executed" not in capsys.readouterr().out


def test_a_state_that_cannot_be_written_leaves_nothing(tmp_path):
    save_checkpoint(tmp_path, 1, {"x": 1})
    with pytest.raises(Exception, match="pickle"):
        save_checkpoint(tmp_path, 2, {"x": (i for i in range(3))})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


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
