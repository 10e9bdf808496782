"""USR-10: a run folder from somebody else. Whatever in it is a link, nothing outside the folder is ever written."""

import os
import shutil

import pytest

from rl_bridge.common.files import RunLock
from rl_bridge.run.provenance import write_provenance
from rl_tools.export.export import ExportOptions, export
from rl_tools.tune.study import run_study
from tests.bridge.tools.tune.tuner import study_of
from tests.support.counting_run import go


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own") / "run"
    go(folder, until=4)
    return folder


def held(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


# Besides what a run has at this point: what it makes later, and what it makes for a moment.
LATER = ("summary.json", "completions.jsonl", "skipped", ".config.json.tmp", "checkpoints/step-00000006.tmp")


def test_a_link_in_the_place_of_any_file_or_folder_is_refused_by_name(begun, tmp_path):
    names = [str(path.relative_to(begun)) for path in sorted(begun.rglob("*"))]
    assert {".lock", "provenance.jsonl", "metrics.jsonl", "config.json", "checkpoints", "events"} <= set(names)
    outside = tmp_path / "outside"
    for name in (*names, *LATER):
        path = begun / name
        outside.mkdir()
        victim = outside / "victim"
        aside = tmp_path / "aside"
        if path.exists():
            os.rename(path, aside)
        if aside.is_dir():
            victim.mkdir()
            (victim / "step-00000009.tmp").mkdir()
        else:
            victim.write_text("not of this run")
        path.symlink_to(victim)
        before = held(outside)
        with pytest.raises(ValueError) as refused:
            go(begun, resume=True)
        assert f"{path} is a link" in str(refused.value), name
        assert held(outside) == before, name
        path.unlink()
        if aside.exists():
            os.rename(aside, path)
        if victim.is_dir():
            (victim / "step-00000009.tmp").rmdir()
            victim.rmdir()
        else:
            victim.unlink()
        outside.rmdir()
    assert go(begun, resume=True)[-1] == (5, 6)


def test_what_is_opened_by_itself_follows_no_link_either(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / ".lock").symlink_to(victim)
    (tmp_path / "provenance.jsonl").symlink_to(victim)
    with pytest.raises(ValueError, match="is a link"):
        RunLock(tmp_path)
    with pytest.raises(OSError, match="symbolic link"):
        write_provenance(tmp_path, 1, {})
    assert victim.read_text() == "kept"


def test_a_pipe_in_a_run_folder_is_refused_instead_of_waited_for(begun):
    os.mkfifo(begun / "samples.json")
    with pytest.raises(ValueError, match=r"samples\.json is no plain file"):
        go(begun, resume=True)
    (begun / "samples.json").unlink()


@pytest.mark.parametrize("name", ["metrics.jsonl", "provenance.jsonl"])
def test_lines_are_not_added_to_a_file_with_a_second_name(begun, tmp_path, name):
    """A copy of hard links, as `cp -al` makes it, stays as it was."""
    (kept := tmp_path / "kept").hardlink_to(begun / name)
    before = kept.read_bytes()
    with pytest.raises(ValueError, match=f"{name} is a hard link"):
        go(begun, resume=True)
    assert kept.read_bytes() == before
    kept.unlink()


@pytest.mark.parametrize("name", ["journal.jsonl", ".lock", "runs", "logs"])
def test_a_study_goes_on_in_its_own_files_alone(tmp_path, name):
    (victim := tmp_path / "victim").write_text("not of this study")
    (folder := tmp_path / "study").mkdir()
    (folder / name).symlink_to(victim)
    with pytest.raises(ValueError, match=f"{name} is a link"):
        run_study(study_of(folder=folder), resume=True)
    assert victim.read_text() == "not of this study"


@pytest.mark.parametrize("name", ["exports", "exports/key"])
def test_an_export_writes_to_the_runs_own_files_alone(begun, tmp_path, name):
    (victim := tmp_path / "victim").mkdir()
    (begun / name).parent.mkdir(exist_ok=True)
    (begun / name).symlink_to(victim)
    with pytest.raises(ValueError, match=f"{name} is a link"):
        export(begun, ExportOptions(to="tensorboard", output=tmp_path / "store"))
    assert not list(victim.iterdir())
    (begun / name).unlink()
    shutil.rmtree(begun / "exports", ignore_errors=True)
