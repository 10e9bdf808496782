"""Exporters beside a run that goes on, with the real libraries: killed, hung, full disks; the run never notices."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_bridge.run.records import last_attempt
from rl_tools.export.export import ExportOptions, export, key_of
from rl_tools.export.live import Exporters, LiveExport
from rl_tools.export.live_process import Limits
from tests.bridge.tools.export.ledgers import Trainer, curves
from tests.bridge.tools.export.stores import READERS
from tests.bridge.tools.export.watching import ALL, processes_of, rows_sent, wait_for

FULL = 48 * 1024
"""Bytes of the longest file on a disk that is as good as full."""
pytestmark = pytest.mark.tools


def long_run(folder: Path, output: Path, trackers: str) -> subprocess.Popen:
    words = [sys.executable, "-m", "tests.bridge.tools.export.long_run", str(folder), str(output), trackers]
    alone = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    return subprocess.Popen(words, env=alone, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def hear(capsys, words: str) -> str:
    """Everything on the terminal until these words come."""
    said = []
    wait_for(words, lambda: said.append(capsys.readouterr().out) or words in "".join(said))
    return "".join(said)


def check(name: str, output: Path, folder: Path):
    found, wanted = READERS[name](output, "tests", key_of(folder)), curves(folder)
    assert wanted and {curve: found[curve] for curve in wanted} == wanted


def test_a_killed_run_and_its_resumption_are_one_curve_and_no_process_is_left(tmp_path, output):
    """SIGKILL in the middle, then Ctrl-C; nobody calls ``rl-fn export``."""
    folder = tmp_path / "run"
    for attempt, number, status in ((1, signal.SIGKILL, -9), (2, signal.SIGINT, 130)):
        trainer = long_run(folder, output, ",".join(ALL))
        wait_for("this attempt's first record", lambda wanted=attempt: last_attempt(folder / "metrics.jsonl") == wanted)
        time.sleep(0.3)
        least = len((folder / "metrics.jsonl").read_bytes().splitlines())
        wait_for("its rows", lambda least=least: [r > least for r in rows_sent(folder).values()] == [True] * len(ALL))
        trainer.send_signal(number)
        assert trainer.wait(60) == status
        wait_for("the end of all exporters", lambda: not processes_of(folder))
    for name in ALL:
        check(name, output, folder)
    lines = [json.loads(line) for line in (folder / "system.jsonl").read_text().splitlines()]
    assert len(lines) > 1 and {"cpu_percent", "run_cores", "run_memory_bytes", "memory_percent"} <= lines[0].keys()
    assert lines[-1]["run_memory_bytes"] > 10e6


@contextmanager
def exporting(folder: Path, output: Path, name: str, **limits):
    """An exporter of a run that this process writes."""
    options = ExportOptions(to=name, output=output, project="tests")
    live = LiveExport([options], limits=Limits(**{"every": 0.1, "end": 2.0, **limits}), patience=1.0)
    exporters = Exporters(live)
    exporters.started(SimpleNamespace(folder=folder))
    try:
        yield exporters
    finally:
        start = time.monotonic()
        exporters.ended(None)
        assert time.monotonic() - start < 60.0
        wait_for("the exporter's end", lambda: not processes_of(folder), 20.0)


@pytest.fixture
def trainer(tmp_path):
    with Trainer(tmp_path / "run") as made:
        yield made


@pytest.fixture
def silent_server():
    """It accepts every connection and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


SERVERS = {
    "mlflow": {"MLFLOW_TRACKING_URI": "URL"},
    "wandb": {"WANDB_MODE": "online", "WANDB_BASE_URL": "URL", "WANDB_API_KEY": "0" * 40},
}


@pytest.mark.parametrize("name", SERVERS)
def test_a_silent_server_is_told_once_and_caught_up(trainer, output, silent_server, name, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        for variable, value in SERVERS[name].items():
            patch.setenv(variable, value.replace("URL", silent_server))
        with exporting(trainer.folder, output, name, hang=1.0):
            trainer.step(2)
            said = hear(capsys, "no answer for 1 s")
            trainer.step(2)
        said += capsys.readouterr().out
    assert said.count(f"{name} is behind this run: no answer for 1 s; to catch up: `rl-fn export {trainer.folder}") == 1
    export(trainer.folder, ExportOptions(to=name, output=output, project="tests"))
    check(name, output, trainer.folder)


def test_a_server_that_is_not_there_is_told_once(trainer, output, monkeypatch, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://user:planted-password@127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with exporting(trainer.folder, output, "mlflow", retry=0.2):
        said = hear(capsys, "is behind this run")
        time.sleep(1.0)
    said += capsys.readouterr().out
    assert said.count("mlflow is behind this run: MlflowException: ") == 1 and "planted-password" not in said


@pytest.mark.parametrize("name", [name for name in ALL if name != "wandb"])
def test_a_store_that_cannot_grow_is_told_once_and_caught_up(trainer, output, name, capsys):
    """As on a full disk: no file of the exporter's process may be longer than 48 KiB."""
    trainer.step(1500)
    with exporting(trainer.folder, output, name, hang=8.0) as exporters:
        [(_, process, _)] = exporters._processes
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (FULL, FULL))
        said = hear(capsys, "is behind this run")
    said += capsys.readouterr().out
    assert said.count(f"{name} is behind this run") == 1
    export(trainer.folder, ExportOptions(to=name, output=output, project="tests"))
    check(name, output, trainer.folder)


def test_a_full_disk_under_wandb_is_told_once_while_the_run_goes_on_and_caught_up(trainer, output, capsys):
    """W&B's own process writes the file, and neither ends nor says anything when the file cannot grow."""
    trainer.step(200)
    with exporting(trainer.folder, output, "wandb", end=1.0) as exporters:
        [(_, process, _)] = exporters._processes
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (FULL, FULL))
        said: list[str] = []

        def told() -> bool:
            trainer.step()
            said.append(capsys.readouterr().out)
            return "is behind this run" in "".join(said)

        wait_for("a word of the full disk", told)
        assert not process.dead.is_set()
        [file] = output.glob(f"wandb/offline-run-*-{key_of(trainer.folder)}/*.wandb")
        assert file.stat().st_size == FULL
        trainer.step(3)
    heard = "".join([*said, capsys.readouterr().out])
    assert f"wandb is behind this run: OSError: W&B's file in {output} stays at {FULL} bytes" in heard
    assert heard.count("\n") == 1
    export(trainer.folder, ExportOptions(to="wandb", output=output, project="tests"))
    check("wandb", output, trainer.folder)


def test_an_exporter_that_is_killed_is_told_once_and_caught_up(trainer, output, capsys):
    with exporting(trainer.folder, output, "trackio"):
        trainer.step(3)
        wait_for("rows", lambda: rows_sent(trainer.folder).get("trackio") == 3)
        for process in processes_of(trainer.folder):
            process.kill()
        trainer.step(3)
        said = hear(capsys, "signal 9")
    assert "trackio is behind this run: its exporter ended with signal 9; to catch up: `rl-fn export" in said
    assert export(trainer.folder, ExportOptions(to="trackio", output=output, project="tests")) == (6, 3)
    check("trackio", output, trainer.folder)
