"""MLflow: a run of an experiment in ``MLFLOW_TRACKING_URI``, or in SQLite in the output's folder."""

import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from rl_tools.export.exporter import About, Artifact, GoesOn, Place, Row, library

KEY = "rl_fn.key"
MOST_METRICS, MOST_PARAMS, LONGEST = 1000, 100, 6000
"""MLflow's limits: of one call, and characters of one value."""


class RunExporter:
    """A run in MLflow, whose points lie at the record's number. Every clock is a metric too: ``clock/tokens``.

    A store in a database keeps a point (name, step, time, value) once, however often the point is sent.
    """

    def __init__(self, about: About, place: Place, memory: dict[str, Any]) -> None:
        self._about, self._place, self._memory = about, place, memory
        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{place.output / 'mlflow.db'}"
        self.goes_on = GoesOn.ALWAYS if "://" in self._uri and self._uri[:5] != "file:" else GoesOn.AFTER_CLOSE
        self._opened: Any = None

    @property
    def _client(self) -> Any:
        if self._opened is None:
            # Set before the import: the library sends usage data of its own otherwise.
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
            self._place.output.mkdir(parents=True, exist_ok=True)
            with warnings.catch_warnings():
                # MLflow's own use of SQLAlchemy, once, when its tables are declared.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._opened = library("mlflow.tracking").MlflowClient(tracking_uri=self._uri)
        return self._opened

    def has(self, rows: int) -> bool:
        """Whether the run is there, is not deleted, and has a point for each row."""
        matches = [run for run in self._runs() if run.info.run_id == self._memory.get("run")]
        return bool(matches) and (rows == 0 or matches[0].data.metrics.get("clock/step", -1.0) >= rows - 1)

    def clear(self) -> None:
        """Delete every run with this key: points cannot be taken back one by one."""
        for run in self._runs():
            self._client.delete_run(run.info.run_id)
        self._memory.pop("run", None)

    def open(self) -> None:
        """Make the run, with its options as parameters and its provenance as tags."""
        if "run" in self._memory:
            return
        experiment = self._experiment()
        if experiment is None:
            artifacts = (self._place.output / "mlflow-artifacts").as_uri() if self._uri[:6] == "sqlite" else None
            experiment = self._client.create_experiment(self._place.project, artifact_location=artifacts)
        provenance = self._about.provenance
        begun = round(provenance[0]["time"] * 1000) if provenance else None
        run = self._client.create_run(experiment, start_time=begun, run_name=self._about.name, tags=self._tags())
        self._memory["run"] = run.info.run_id
        entities = library("mlflow.entities")
        params = [entities.Param(_name(k), str(v)[:LONGEST]) for k, v in self._about.options().items()]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._memory["run"], params=params[start : start + MOST_PARAMS])
        self._client.log_dict(self._memory["run"], {"attempts": list(provenance)}, "provenance.json")

    def send(self, rows: Sequence[Row]) -> None:
        """Send all points of the rows, in calls of at most MLflow's limit."""
        metric = library("mlflow.entities").Metric
        points = []
        for row in rows:
            clocks = {f"clock/{name}": value for name, value in row.clocks.items()}
            for name, value in {**row.metrics, **clocks}.items():
                points.append(metric(_name(name), value, round(row.time * 1000), row.number))
        for start in range(0, len(points), MOST_METRICS):
            self._client.log_batch(self._memory["run"], metrics=points[start : start + MOST_METRICS])

    def artifact(self, artifact: Artifact) -> None:
        """Send the manifest as ``model/manifest.json``, version and checksum as tags, and the files on request."""
        run = self._memory["run"]
        self._client.log_dict(run, artifact.manifest(), "model/manifest.json")
        self._client.set_tag(run, "rl_fn.model.sha256", artifact.sha256)
        self._client.set_tag(run, "rl_fn.model.version", str(artifact.version))
        if artifact.copied:
            self._client.log_artifacts(run, str(artifact.folder), "model")

    def close(self, ended: bool) -> None:
        """Mark a run that came to its end as finished; any other one stays running in MLflow."""
        if ended and "run" in self._memory:
            self._client.set_terminated(self._memory["run"], "FINISHED")

    def _experiment(self) -> str | None:
        experiment = self._client.get_experiment_by_name(self._place.project)
        return None if experiment is None else experiment.experiment_id

    def _runs(self) -> list[Any]:
        experiment = self._experiment()
        if experiment is None:
            return []
        return list(self._client.search_runs([experiment], f"tags.`{KEY}` = '{self._about.key}'"))

    def _tags(self) -> dict[str, str]:
        last: Mapping[str, Any] = self._about.provenance[-1] if self._about.provenance else {}
        git = last.get("git") or {}
        tags = {
            KEY: self._about.key,
            "mlflow.source.type": "LOCAL",
            "mlflow.source.name": " ".join(last.get("command", ())),
            "mlflow.source.git.commit": git.get("commit"),
            "mlflow.source.git.branch": git.get("branch"),
            "mlflow.source.git.repoURL": git.get("remote"),
            "rl_fn.git.dirty": json.dumps(git.get("dirty")),
            "rl_fn.git.diff_sha256": git.get("diff_sha256"),
        }
        tags |= {f"rl_fn.fingerprint.{name}": value for name, value in last.get("fingerprints", {}).items()}
        return {name: str(value)[:LONGEST] for name, value in tags.items() if value}


def _name(name: str) -> str:
    """A name in MLflow's characters.

    >>> _name("policy/reward[exact]")
    'policy/reward_exact_'
    """
    return re.sub(r"[^\w\-. /:]", "_", name)[:250]
