"""What two runs that should be the same are compared by."""

import json

import torch
from safetensors.torch import load_file

from rl_bridge.checkpoints.restoring import read_driver
from rl_bridge.common.step_folders import damage


def metrics(folder):
    """The records of a run without the times."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    of_session = ("seconds", "tokens_per_second", "run", "attempt", "time")
    of_session += ("trainer_idle_seconds", "rollout_idle_seconds")
    return [{k: v for k, v in r.items() if k not in of_session} for r in records]


def result(folder):
    """Everything that a run leaves behind and that must not depend on interruptions."""
    completions = folder / "completions.jsonl"
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    return {
        "weights": (folder / "model" / "model.safetensors").read_bytes(),
        "metrics": metrics(folder),
        "completions": completions.read_bytes() if completions.exists() else b"",
        "samples": (folder / "samples.json").read_text("utf-8"),
        "summary": {k: v for k, v in summary.items() if k != "seconds"},
        "state": checkpoint(max((folder / "checkpoints").iterdir())),
    }


def checkpoint(path):
    """What a checkpoint holds, by the names of its files, without the times."""
    assert damage(path) is None
    found = {}
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        if name.startswith("driver"):
            driver = read_driver(path)
            del driver["state"]["seconds"], driver["random"]["python"]
            del driver["state"]["record"]["metrics_bytes"], driver["state"]["record"]["crc32"]
            found["driver"] = driver
        elif file.suffix == ".safetensors":
            found[name] = load_file(file)
        elif file.suffix == ".json" and name != "manifest.json":
            found[name] = json.loads(file.read_text("utf-8"))
            # beartype, switched on in tests alone, draws from Python's generator
            found[name].pop("python", None)
    return found


def assert_same(a, b, where="result"):
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    else:
        assert a == b, where
