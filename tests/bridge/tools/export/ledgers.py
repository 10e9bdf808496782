"""Runs' folders as a trainer makes them, also cut and gone on with; what their curves are, told from the file alone."""

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rl_bridge.common.files import write_json
from rl_bridge.run.provenance import write_provenance
from rl_bridge.run.recorder import Recorder

CLOCKS = ("step", "tokens", "weights_version", "seconds")


@dataclass(frozen=True)
class Inner:
    steps: int = 3


@dataclass(frozen=True)
class Options:
    rate: float = 0.5
    policy: Inner = field(default_factory=Inner)
    tags: tuple[str, ...] = ("a", "b")


class Trainer:
    """Writes a run's folder. ``step`` is a record; ``kill`` and ``resume`` lose those after the last checkpoint."""

    def __init__(self, folder: Path, config=None):
        folder.mkdir(parents=True)
        self.folder, self.attempt_value = folder, 0.0
        write_json(folder / "config.json", asdict(config or Options()))
        self._open(None)
        self.checkpoint()

    def _open(self, position):
        self._recorder = Recorder(self.folder, position, again=position is not None)
        write_provenance(self.folder, self._recorder.attempt, {"data": "0123456789abcdef"})
        self.attempt_value = self._recorder.attempt / 16

    def checkpoint(self):
        self._position = self._recorder.position()

    def step(self, count=1, **metrics):
        for _ in range(count):
            number = self._recorder.logged
            stage = "sft" if number < 2 else "policy"
            record = {"stage": stage, "step": number, "seconds": 1.5 * number, "trained_tokens": 7 + number}
            # Two records of the same version, as after a skipped update.
            record |= {"weights_version": 1 + number // 2, "optimizer_step": number // 2}
            self._recorder.write({**record, "reward": number / 4 + self.attempt_value, **metrics})
        return self

    def note(self):
        self._recorder.note({"step": self._recorder.logged, "meshes": ["policy from 1 to 2"]})

    def resume(self):
        """As after SIGKILL: what came after the checkpoint is cut off."""
        self._recorder.close()
        self._open(self._position)
        return self

    def end(self):
        model = self.folder / "model"
        model.mkdir(exist_ok=True)
        (model / "weights.bin").write_bytes(b"\x01\x02" * 100)
        (model / "config.json").write_text("{}")
        write_json(self.folder / "summary.json", {"result": "done"})
        self._recorder.close()
        return self.folder

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._recorder.close()


def sample(folder, count=3):
    """Lines of system metrics."""
    with (folder / "system.jsonl").open("a") as file:
        for number in range(count):
            file.write(json.dumps({"time": 1.8e9 + number, "cpu_percent": 10.0 + number}) + "\n")


def curves(folder: Path) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(metric, clock) → points in the order of the records."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    tokens, number = 0, 0
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "stage" not in record:
            continue
        tokens += record["trained_tokens"]
        clocks = {"step": number, "tokens": tokens} | {name: record[name] for name in CLOCKS[2:]}
        for name in set(record) & {"reward", "trained_tokens", "loss"}:
            for clock, position in clocks.items():
                found.setdefault((f"{record['stage']}/{name}", clock), []).append((position, comparable(record[name])))
        number += 1
    return found


def comparable(value):
    """NaN equals itself; MLflow's databases have the largest number for infinity."""
    value = float(value)
    return "nan" if math.isnan(value) else "inf" if value > 1e300 else value


def kept_bytes(folder: Path) -> bytes:
    """Names and contents of all files under a folder."""
    found = []
    for path, _, names in os.walk(folder):
        for name in names:
            file = Path(path) / name
            found += [str(file).encode(), file.read_bytes() if file.is_file() else b""]
    return b"\n".join(found)
