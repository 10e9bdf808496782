"""trackio: its SQLite database in the output's folder. ``trackio sync`` takes it from there to a Space."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl_tools.export.exporter import About, Artifact, GoesOn, Place, Row, library


class RunExporter:
    """A run in trackio. Rows go to trackio's own storage at once, each with an id: storage leaves out a repeated row.

    ``trackio.log`` would put rows into a queue, and a killed process would lose them.
    """

    goes_on = GoesOn.ALWAYS

    def __init__(self, about: About, place: Place, memory: dict[str, Any]) -> None:
        self._about, self._memory = about, memory
        self._folder = Path(os.environ.get("TRACKIO_DIR") or place.output / "trackio")
        self._project, self._name, self._id = place.project, about.name, about.key

    @property
    def _storage(self) -> Any:
        os.environ["TRACKIO_DIR"] = str(self._folder)
        storage = library("trackio.sqlite_storage").SQLiteStorage
        used = Path(library("trackio.utils").TRACKIO_DIR)
        if used != self._folder:
            raise ValueError(f"trackio writes to {used} in this process, and not to {self._folder}")
        return storage

    def has(self, rows: int) -> bool:
        """Whether the run has its config and exactly these rows."""
        config = self._storage.get_run_config(self._project, self._name, run_id=self._id)
        return config is not None and self._rows() == rows

    def clear(self) -> None:
        """Delete the run's rows and config.

        Raises:
            OSError: trackio could not delete them.
        """
        self._memory.pop("first", None)
        if not self._storage.get_project_db_path(self._project).exists():
            return
        self._storage.delete_run(self._project, self._name, run_id=self._id)
        if left := self._rows():
            raise OSError(f"trackio did not delete {left} rows of {self._name} in {self._folder}")

    def open(self) -> None:
        """Make the database, with the run's config."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._storage.init_db(self._project)

    def send(self, rows: Sequence[Row]) -> None:
        """Write rows in one transaction. System metrics have no step in trackio, their time alone."""
        system = [row for row in rows if "step" not in row.clocks]
        steps = [row for row in rows if "step" in row.clocks]
        if steps:
            self._memory.setdefault("first", self._log_id(steps[0]))
            self._storage.bulk_log(
                **self._columns(steps),
                steps=[row.number for row in steps],
                metrics_list=[
                    {**row.metrics, **{f"clock/{name}": value for name, value in row.clocks.items()}} for row in steps
                ],
                config=self._config(),
            )
        if system:
            self._storage.bulk_log_system(**self._columns(system), metrics_list=[dict(row.metrics) for row in system])

    def artifact(self, artifact: Artifact) -> None:
        """Write checksum, version and names of files to the run's config; trackio gets no copy of the files."""
        self._memory["model"] = artifact.manifest()
        self._write_config()

    def close(self, ended: bool) -> None:
        """Write the last attempt's config; everything else is in the database already."""
        self._write_config()

    def _config(self) -> dict[str, Any]:
        provenance = {"key": self._about.key, "attempts": list(self._about.provenance)}
        model = {"model": self._memory["model"]} if "model" in self._memory else {}
        return {**self._about.options(), "rl_fn": {**provenance, **model}}

    def _write_config(self) -> None:
        """Send the config with the first row again: storage takes a config with rows alone, and leaves this row out."""
        if "first" in self._memory:
            now = datetime.now(UTC).isoformat()
            about = {"project": self._project, "run": self._name, "run_id": self._id, "timestamps": [now], "steps": [0]}
            again = {"metrics_list": [{}], "log_ids": [self._memory["first"]], "config": self._config()}
            self._storage.bulk_log(**about, **again)

    def _log_id(self, row: Row) -> str:
        return f"{self._id}-{row.identity}"

    def _rows(self) -> int:
        return self._storage.get_log_count(self._project, self._name, run_id=self._id)

    def _columns(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {
            "project": self._project,
            "run": self._name,
            "run_id": self._id,
            "timestamps": [datetime.fromtimestamp(row.time, UTC).isoformat() for row in rows],
            "log_ids": [self._log_id(row) for row in rows],
        }
