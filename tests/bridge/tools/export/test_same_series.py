"""After every export the store has the ledger's curves, over every clock: nothing missing, nothing twice."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl_bridge.common.files import write_json
from rl_tools.cli import main
from rl_tools.export.export import ExportOptions, Session, Target, export, key_of
from rl_tools.export.live import live_export
from rl_tools.report.run_files import read_run
from tests.bridge.tools.export.ledgers import Trainer, curves, sample
from tests.bridge.tools.export.stores import READERS, TRACKERS, remove

KILLED = """
import os, signal, sys
from pathlib import Path
from rl_tools.export.export import ExportOptions, Session
with Session(Path(sys.argv[1]), ExportOptions(to=sys.argv[2], output=Path(sys.argv[3]), project="tests")) as session:
    session._remember = lambda: os.kill(os.getpid(), signal.SIGKILL)
    session.catch_up()
"""


@pytest.fixture
def trainer(tmp_path):
    with Trainer(tmp_path / "run") as made:
        yield made


@pytest.fixture(params=TRACKERS)
def tracker(request, output, trainer):
    return Tracker(request.param, output, trainer.folder)


class Tracker:
    """Exports the trainer's run, and compares the store with the file."""

    def __init__(self, name: str, output: Path, folder: Path):
        self.name, self.output, self.folder = name, output, folder
        self.options = ExportOptions(to=name, output=output, project="tests")

    def export(self) -> tuple[int, int]:
        return export(self.folder, self.options)

    def killed(self) -> int:
        """An export in a process of its own that is killed when rows are sent; its exit status."""
        words = [str(self.folder), self.name, str(self.output)]
        # W&B's own process would be shared with it.
        alone = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
        command = [sys.executable, "-c", KILLED, *words]
        # No pipes: a process that the library leaves behind would hold them.
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.run(command, check=False, env=alone, **quiet).returncode

    def check(self):
        found = READERS[self.name](self.output, "tests", key_of(self.folder))
        wanted = curves(self.folder)
        assert wanted and {name: found[name] for name in wanted} == wanted
        return found


def test_an_export_again_adds_nothing_and_a_later_one_what_is_new(trainer, tracker):
    trainer.step(4)
    trainer.note()
    assert tracker.export() == (4, 4)
    tracker.check()
    assert tracker.export() == (4, 0)
    tracker.check()
    trainer.step(3)
    assert tracker.export()[0] == 7
    tracker.check()
    assert tracker.export() == (7, 0)


def test_what_was_cut_off_by_a_resumed_run_is_taken_back(trainer, tracker):
    trainer.step(3).checkpoint()
    trainer.step(3)
    tracker.export()
    trainer.resume().step(1)
    tracker.export()
    found = tracker.check()
    assert [value for _, value in found["policy/reward", "step"]] == [2 / 4 + 1 / 16, 3 / 4 + 2 / 16]
    # Longer than before the cut, and cut again.
    trainer.step(6)
    tracker.export()
    tracker.check()
    trainer.resume()
    tracker.export()
    tracker.check()


def test_a_live_export_sees_the_cut_between_two_looks(trainer, tracker):
    trainer.step(3).checkpoint()
    with Session(tracker.folder, tracker.options) as session:
        trainer.step(2)
        assert session.catch_up() == 5
        trainer.resume().step(4)
        session.catch_up()
        assert session.records == 7
        trainer.step(1)
        session.catch_up()
    tracker.check()


def test_after_an_exporter_that_was_killed_nothing_is_twice(trainer, tracker):
    """It had sent rows and had not yet remembered that it had: the worst moment."""
    trainer.step(2)
    tracker.export()
    trainer.step(3)
    assert tracker.killed() == -signal.SIGKILL
    trainer.step(1)
    assert tracker.export()[0] == 6
    tracker.check()


def test_a_store_that_was_removed_is_filled_again(trainer, tracker):
    trainer.step(3)
    tracker.export()
    remove(tracker.name, tracker.output, "tests", key_of(tracker.folder))
    assert tracker.export() == (3, 3)
    tracker.check()


@pytest.mark.parametrize("changed", ["options", "provenance"])
def test_an_export_of_a_run_with_other_options_begins_anew(trainer, tracker, changed):
    """SURV-14: what stands in the store beside the curves is that of the run today, and no record is twice.

    It begins anew once: the exports after that send what is new, where the store is not one file of one process.
    """
    trainer.step(3)
    assert tracker.export() == (3, 3)
    if changed == "options":
        write_json(tracker.folder / "config.json", {"rate": 0.25, "policy": {"steps": 4}})
    else:
        trainer.checkpoint()
        trainer.resume()
    trainer.step(1)
    assert tracker.export() == (4, 4)
    tracker.check()
    assert tracker.export() == (4, 0)
    trainer.step(1)
    assert tracker.export() == (5, 5 if tracker.name == "wandb" else 1)
    assert tracker.export() == (5, 0)
    tracker.check()


def test_not_a_number_and_infinity_are_points_too(trainer, tracker):
    trainer.step(1, loss=float("nan")).step(1, loss=float("inf")).step(1, loss=0.5)
    tracker.export()
    found = tracker.check()
    assert [value for _, value in found["sft/loss", "step"]] == ["nan", "inf"]


def test_an_empty_run_and_one_with_system_metrics_alone(trainer, tracker):
    assert tracker.export() == (0, 0)
    sample(tracker.folder)
    assert tracker.export() == (0, 0)
    trainer.step(1)
    sample(tracker.folder, 2)
    assert tracker.export()[0] == 1
    tracker.check()


def test_two_exports_to_one_place_at_once_are_refused(trainer, tracker):
    trainer.step(1)
    with Session(tracker.folder, tracker.options) as session:
        session.catch_up()
        with pytest.raises(ValueError, match=rf"is being exported to {tracker.name} by process {os.getpid()}"):
            Session(tracker.folder, tracker.options).__enter__()
    tracker.check()


def test_the_command_says_what_is_there(trainer, tracker, capsys):
    trainer.step(2)
    words = ["export", str(tracker.folder), "--to", tracker.name, "--output", str(tracker.output), "--project", "tests"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"{tracker.name} has 2 records of {tracker.folder} in {tracker.output}, 2 of them new"
    )
    assert main([*words, "--again"]) == 0
    tracker.check()


def test_what_is_no_run_and_what_is_not_installed_is_said_in_one_line(tmp_path, trainer, capsys, monkeypatch):
    assert main(["export", str(tmp_path), "--to", "tensorboard"]) == 1
    assert "has no metrics.jsonl: it is not a run's folder" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["export", str(trainer.folder), "--to", "wandb", "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("wandb is not installed: pip install '.[trackers]'\n")


ODD = {"a text": "x", "null": None, "a list": [1], "an object": {"a": 1}, "NaN": float("nan"), "huge": 10**400}
CLOCKS_AND_STAGE = ("stage", "step", "seconds", "time", "trained_tokens", "weights_version", "optimizer_step")


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", CLOCKS_AND_STAGE)
def test_a_record_of_another_kind_is_named_with_its_place(trainer, output, name, odd):
    """Whoever edits the record by hand reads which entry of which line it is; nothing of it is left out."""
    trainer.step(3)
    file = trainer.folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    edited = {"a text": 7 if name == "stage" else "x"}.get(odd, ODD[odd])
    lines[1][name] = edited
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=rf"metrics\.jsonl, line 2: {name} is .+: expected (text|a (finite|whole))"):
        export(trainer.folder, ExportOptions(to="tensorboard", output=output))


@pytest.mark.parametrize("name", [*CLOCKS_AND_STAGE, "loss", "note"])
@pytest.mark.parametrize("odd", ODD)
def test_an_export_reads_a_record_as_a_report_does(trainer, output, name, odd):
    """A metric that is text was refused by the report, and left out of the export without a word."""
    trainer.step(3)
    file = trainer.folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[1][name] = ODD[odd]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    refusals = []
    for read in (read_run, lambda folder: export(folder, ExportOptions(to="tensorboard", output=output))):
        try:
            read(trainer.folder)
            refusals.append(None)
        except ValueError as error:
            refusals.append(str(error).partition(": ")[2])
    fits = ("a text",) if name == "stage" else ("null", "NaN") if name in ("loss", "note") else ()
    assert refusals[0] == refusals[1] and (refusals[0] is None) == (odd in fits)


@pytest.mark.parametrize("kind", ["a file", "below a file"])
@pytest.mark.parametrize("to", get_args(Target))
def test_an_output_that_is_no_folder_is_refused_by_its_option(trainer, tmp_path, to, kind):
    """The error named a path inside of it, after a library had begun its work."""
    trainer.step(1)
    (tmp_path / "file").write_text("mine")
    output = tmp_path / "file" if kind == "a file" else tmp_path / "file" / "below"
    with pytest.raises(ValueError, match=f"--output {re.escape(str(output))}: {tmp_path}/file is a file, and a folder"):
        export(trainer.folder, ExportOptions(to=to, output=output))
    assert (tmp_path / "file").read_text() == "mine" and not (trainer.folder / "exports").exists()


def test_a_step_without_its_stage_is_not_left_out(trainer, output):
    trainer.step(3)
    file = trainer.folder / "metrics.jsonl"
    file.write_text(file.read_text().replace('"stage": "sft", ', "", 1))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1 has no stage: expected text"):
        export(trainer.folder, ExportOptions(to="tensorboard", output=output))


@pytest.mark.parametrize("config", [None, "", "[]", '{"a":'], ids=["gone", "empty", "a list", "torn"])
def test_a_config_that_cannot_be_read_is_named(trainer, output, config):
    trainer.step(3)
    file = trainer.folder / "config.json"
    file.unlink() if config is None else file.write_text(config)
    with pytest.raises(ValueError, match=r"config\.json(: it is not a run's folder| is damaged)"):
        export(trainer.folder, ExportOptions(to="tensorboard", output=output))


@pytest.mark.parametrize("summary", ["", "[]", '{"a":', "null"], ids=["empty", "a list", "torn", "null"])
def test_a_summary_that_cannot_be_read_is_named_before_anything_is_sent(trainer, tmp_path, summary):
    """The report refused it, and an export took the run as one that has ended."""
    output = tmp_path / "stores"
    folder = trainer.step(3).end()
    (folder / "summary.json").write_text(summary)
    for read in (read_run, lambda run: export(run, ExportOptions(to="tensorboard", output=output))):
        with pytest.raises(ValueError, match=r"summary\.json(: it is (\[\]|null): expected an object| is damaged)"):
            read(folder)
    assert not output.exists()


def shards(model: Path) -> list[Path]:
    """Two files of weights, and the index that names them."""
    names = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    for number, name in enumerate(names):
        save_file({f"w{number}": np.arange(100.0)}, model / name)
    places = {"weight_map": {f"w{number}": name for number, name in enumerate(names)}}
    write_json(model / "model.safetensors.index.json", places)
    return [model / name for name in names]


def without_weights(file: Path) -> None:
    """Leave the description of a model alone."""
    for path in file.parent.iterdir():
        path.unlink()
    write_json(file.parent / "config.json", {})


BROKEN = {
    "cut off": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "gone": Path.unlink,
    "an index without places": lambda file: write_json(file.parent / "model.safetensors.index.json", {}),
    "no index": lambda file: (file.parent / "model.safetensors.index.json").unlink(),
    "no weights": without_weights,
    "a torn index": lambda file: (file.parent / "model.safetensors.index.json").write_text("{"),
}


@pytest.mark.parametrize("artifacts", ["manifest", "files"])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_model_that_is_not_whole_is_not_exported(trainer, output, broken, artifacts):
    """Its files were sent, or their checksums, without a word. The run's curves are in the store all the same."""
    folder = trainer.step(3).end()
    _, file = shards(folder / "model")
    options = ExportOptions(to="tensorboard", output=output, project="tests", artifacts=artifacts)
    BROKEN[broken](file)
    name = re.escape(file.name)
    named = rf"{name}( cannot be read as|, which is not there)|index\.json (has no|is dam)|it is not whole"
    with pytest.raises(ValueError, match=named):
        export(folder, options)
    stored = READERS["tensorboard"](output, "tests", key_of(folder))
    assert {name: stored[name] for name in curves(folder)} == curves(folder)
    shards(folder / "model")
    assert export(folder, options)[0] == 3


def test_trackers_that_cannot_write_are_refused_by_the_trainer_s_option(tmp_path):
    """The exporter's process said ``--output``, which the trainer does not have, when the run had begun."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"--tracker-output .*/file/below: .*/file is a file, and a folder is needed"):
        live_export(["tensorboard"], tmp_path / "file" / "below", "tests", 0.0)


DAMAGES = {
    "empty": lambda state: {},
    "a list": lambda state: [state],
    "an older one": lambda state: {**state, "tails": {}},
    "a size": lambda state: {
        **state,
        "tails": {**state["tails"], "metrics": {**state["tails"]["metrics"], "size": "x"}},
    },
    "no memory": lambda state: {**state, "memory": None},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_cursor_that_cannot_be_read_counts_as_none(trainer, output, damage):
    trainer.step(3)
    options = ExportOptions(to="tensorboard", output=output)
    assert export(trainer.folder, options) == (3, 3)
    (cursor,) = (trainer.folder / "exports").glob("*.json")
    cursor.write_text(json.dumps(DAMAGES[damage](json.loads(cursor.read_text()))))
    assert export(trainer.folder, options) == (3, 3)
    assert export(trainer.folder, options) == (3, 0)
