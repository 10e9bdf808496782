"""TensorBoard: event files, in a folder a clock: the same curves against steps, tokens, versions of the weights."""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rl_tools.export.exporter import About, Artifact, GoesOn, Place, Row, library


class RunExporter:
    """Event files in ``OUTPUT/KEY/CLOCK``. TensorBoard shows each folder as a run.

    Seconds of training are milliseconds, as steps are whole numbers.
    """

    goes_on = GoesOn.AFTER_CLOSE

    def __init__(self, about: About, place: Place, memory: dict[str, Any]) -> None:
        self._about, self._memory = about, memory
        self._folder = place.output / about.key
        self._files: dict[str, Any] = {}
        self._event: Any = None
        self._summary: Any = None

    def has(self, rows: int) -> bool:
        """Whether the files are as long as this exporter left them."""
        sizes: dict[str, int] = self._memory.get("sizes", {})
        paths = {name: self._folder / name for name in sizes}
        return bool(sizes) and all(path.exists() and path.stat().st_size == sizes[name] for name, path in paths.items())

    def clear(self) -> None:
        """Remove the run's folder."""
        if self._folder.exists():
            shutil.rmtree(self._folder)
        self._memory.pop("sizes", None)

    def open(self) -> None:
        """Import the library, and write config and provenance where there are no files yet."""
        self._event = library("tensorboard.compat.proto.event_pb2").Event
        self._summary = library("tensorboard.compat.proto.summary_pb2").Summary
        if not self._memory.get("sizes"):
            about = {"config": self._about.config, "provenance": self._about.provenance}
            self._text("about", about)
            self._hyper_parameters()
            self._keep_sizes()

    def send(self, rows: Sequence[Row]) -> None:
        """Write an event for each row and clock."""
        for row in rows:
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in row.metrics.items()]
            for clock, position in _positions(row.clocks).items():
                self._write(clock, self._event(wall_time=row.time, step=position, summary=self._summary(value=values)))
        self._keep_sizes()

    def artifact(self, artifact: Artifact) -> None:
        """Write the manifest as a text; event files hold no models."""
        self._text("model", artifact.manifest())
        self._keep_sizes()

    def close(self, ended: bool) -> None:
        """Close the files."""
        self._keep_sizes()
        for _, file in self._files.values():
            file.close()
        self._files.clear()

    def _write(self, clock: str, event: Any) -> None:
        if clock not in self._files:
            folder = self._folder / clock
            folder.mkdir(parents=True, exist_ok=True)
            # Names in the order of time, which is the order in which TensorBoard reads them.
            path = folder / f"events.out.tfevents.{time.time_ns():020d}.rl-fn"
            file = path.open("xb")
            writer = library("tensorboard.summary.writer.record_writer").RecordWriter(file)
            self._files[clock] = writer, file
            writer.write(self._event(wall_time=event.wall_time, file_version="brain.Event:2").SerializeToString())
        self._files[clock][0].write(event.SerializeToString())

    def _text(self, tag: str, value: Mapping[str, Any]) -> None:
        content = json.dumps(value, indent=2, ensure_ascii=False)
        lines = "\n".join(f"    {line}" for line in content.splitlines())
        metadata = library("tensorboard.plugins.text.metadata").create_summary_metadata(tag, "")
        tensor = library("tensorboard.util.tensor_util").make_tensor_proto(lines)
        value_proto = self._summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self._write("step", self._event(wall_time=time.time(), step=0, summary=self._summary(value=[value_proto])))

    def _hyper_parameters(self) -> None:
        metadata = library("tensorboard.plugins.hparams.metadata")
        data = library("tensorboard.plugins.hparams.plugin_data_pb2")
        info = data.SessionStartInfo(start_time_secs=time.time())
        for name, value in self._about.options().items():
            if isinstance(value, bool):
                info.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                info.hparams[name].number_value = value
            else:
                info.hparams[name].string_value = str(value)
        summary = metadata.create_summary_metadata(data.HParamsPluginData(session_start_info=info))
        value = self._summary.Value(tag=metadata.SESSION_START_INFO_TAG, metadata=summary, tensor=metadata.NULL_TENSOR)
        self._write("step", self._event(wall_time=time.time(), summary=self._summary(value=[value])))

    def _keep_sizes(self) -> None:
        for _, file in self._files.values():
            file.flush()
        paths = sorted(self._folder.glob("*/events.out.tfevents.*"))
        self._memory["sizes"] = {path.relative_to(self._folder).as_posix(): path.stat().st_size for path in paths}


def _positions(clocks: Mapping[str, float]) -> dict[str, int]:
    positions = {name: int(value) for name, value in clocks.items() if name != "seconds"}
    return positions | ({"milliseconds": round(clocks["seconds"] * 1000)} if "seconds" in clocks else {})
