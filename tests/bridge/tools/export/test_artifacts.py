"""What a store has of the model that a run made: its version, its checksums, and its bytes where they are kept."""

import hashlib
import json
from pathlib import Path

import pytest

from rl_tools.cli import main
from rl_tools.export.export import key_of
from tests.bridge.tools.export.ledgers import Trainer
from tests.bridge.tools.export.stores import mlflow_run, trackio_logs, wandb_records

pytestmark = pytest.mark.tools


def of_wandb(output, key):
    [made] = [record.artifact for record in wandb_records(output, key) if record.HasField("artifact")]
    return json.loads(made.metadata), {e.path: Path(e.local_path) for e in made.manifest.contents}


def of_mlflow(output, key):
    client, run = mlflow_run(output, "tests", key)
    folder = Path(client.download_artifacts(run.info.run_id, "model"))
    manifest = json.loads((folder / "manifest.json").read_text())
    tags = run.data.tags
    assert (tags["rl_fn.model.version"], tags["rl_fn.model.sha256"]) == (str(manifest["version"]), manifest["sha256"])
    paths = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    paths.pop("manifest.json")
    return manifest, paths


def of_trackio(output, key):
    storage, _ = trackio_logs(output, "tests", key)
    return storage.get_run_config("tests", None, run_id=key)["rl_fn"]["model"], {}


READERS = {"wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio}


@pytest.mark.parametrize("artifacts", ["manifest", "files"])
@pytest.mark.parametrize("name", READERS)
def test_the_store_has_the_models_version_and_checksums_and_its_bytes(tmp_path, output, name, artifacts):
    with Trainer(tmp_path / "run") as trainer:
        folder = trainer.step(5).end()
    model = folder / "model"
    words = ["export", str(folder), "--to", name, "--output", str(output), "--project", "tests"]
    assert main([*words, "--artifacts", artifacts]) == 0
    manifest, kept = READERS[name](output, key_of(folder))
    wanted = {file.name: file.read_bytes() for file in model.iterdir()}
    files = [
        {"path": path, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for path, data in sorted(wanted.items())
    ]
    whole = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    # The last of five records was made with version 1 + 4 // 2.
    assert manifest == {"version": 3, "sha256": whole, "files": files}
    copied = artifacts == "files" and name != "trackio"
    assert {path: file.read_bytes() for path, file in kept.items()} == (wanted if copied else {})
