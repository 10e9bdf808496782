"""What two runs that should be the same are compared by."""

import json

import torch


def metrics(folder):
    """The records of a run without the times."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [{k: v for k, v in r.items() if k not in ("seconds", "tokens_per_second")} for r in records]


def result(folder):
    """Everything that a run leaves behind and that must not depend on interruptions."""
    checkpoints = sorted((folder / "checkpoints").iterdir())
    state = torch.load(checkpoints[-1] / "state.pt", weights_only=True)
    del state["random"]["python"]  # beartype, switched on in tests alone, draws from Python's generator
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    return {
        "weights": (folder / "model" / "model.safetensors").read_bytes(),
        "metrics": metrics(folder),
        "samples": (folder / "samples.json").read_text("utf-8"),
        "summary": {k: v for k, v in summary.items() if k != "seconds"},
        "state": {k: v for k, v in state.items() if k not in ("seconds", "metrics_bytes")},
    }


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
