"""What each library's own store has of a run, read by the library, as ``ledgers.curves`` has it."""

import json
import os
import shutil
import struct
import warnings
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.bridge.tools.export.ledgers import CLOCKS, comparable

TRACKERS = ["tensorboard", *(pytest.param(name, marks=pytest.mark.tools) for name in ("wandb", "mlflow", "trackio"))]


def tensorboard(output: Path, project: str, key: str):
    found = {}
    for clock in CLOCKS:
        folder = "milliseconds" if clock == "seconds" else clock
        accumulator = EventAccumulator(str(output / key / folder), size_guidance={"scalars": 0}).Reload()
        for tag in accumulator.Tags()["scalars"]:
            scale = 1000 if clock == "seconds" else 1
            found[tag, clock] = [(e.step / scale, comparable(e.value)) for e in accumulator.Scalars(tag)]
    return found


def wandb_records(output: Path, key: str):
    """Of the one offline run with this key, told by W&B's own messages; the file is LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    [file] = output.glob(f"wandb/offline-run-*-{key}*/*.wandb")
    data, place, part = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        part += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            yield record


def wandb_history(output: Path, key: str):
    """Rows of history as dicts."""
    for record in wandb_records(output, key):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json) for item in items}


def wandb(output: Path, project: str, key: str):
    return of_rows(wandb_history(output, key))


def mlflow_run(output: Path, project: str, key: str):
    """(Client, the one run with this key that is not deleted)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{output / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(project)
    [run] = client.search_runs([experiment.experiment_id], f"tags.`rl_fn.key` = '{key}'")
    return client, run


def mlflow(output: Path, project: str, key: str):
    client, run = mlflow_run(output, project, key)
    rows = {}
    for name in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, name):
            row = rows.setdefault((point.step, name.startswith("system")), {})
            assert name not in row, f"{name} has two points at {point.step}"
            row[name] = point.value
    return of_rows(rows[place] for place in sorted(rows))


def trackio_logs(output: Path, project: str, key: str):
    os.environ["TRACKIO_DIR"] = str(output / "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage, SQLiteStorage.get_logs(project, None, run_id=key)


def trackio(output: Path, project: str, key: str):
    return of_rows(trackio_logs(output, project, key)[1])


def of_rows(rows):
    found = {}
    for row in rows:
        for name, value in row.items():
            if "clock/step" in row and not name.startswith(("_", "clock/")) and "/" in name:
                for clock in CLOCKS:
                    found.setdefault((name, clock), []).append((row[f"clock/{clock}"], comparable(value)))
    return found


def remove(name: str, output: Path, project: str, key: str):
    """Of one run, by other hands than the exporter's."""
    if name == "mlflow":
        client, run = mlflow_run(output, project, key)
        client.delete_run(run.info.run_id)
    elif name == "trackio":
        storage, _ = trackio_logs(output, project, key)
        assert storage.delete_run(project, None, run_id=key)
    else:
        [folder] = output.glob(f"wandb/offline-run-*-{key}" if name == "wandb" else key)
        shutil.rmtree(folder)


READERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow, "trackio": trackio}
