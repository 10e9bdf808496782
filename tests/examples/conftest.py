import importlib.util
import json

import pytest

from rl_bridge import current_executor
from rl_bridge.common.terminal import remarks
from rl_bridge.models.pretrained import save_pretrained
from rl_bridge.models.small import character_tokenizer, tiny_qwen2
from rl_bridge.run import recorder

# Where Ray is not installed, its tests are not there: they would be skipped otherwise, also under another marker.
collect_ignore = [] if importlib.util.find_spec("ray") else ["test_over_ray.py"]

PROBLEMS = [(f"{a}+{b}=", a + b) for a in range(10, 14) for b in range(10, 14)]


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """Drawing takes longer than a tiny run."""
    monkeypatch.setattr(recorder, "draw_curves", lambda *_, **__: None)


@pytest.fixture
def ended():
    """Run an example in this process, whose engines are then gone, however it ends."""

    def run(example, *arguments, **options):
        current_executor().stop()  # with what an earlier test of this process has left in it
        remarks()  # and its remarks about rows
        try:
            example.main(*map(str, arguments), **options)
        finally:
            current_executor().stop()

    return run


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A model small enough for a run to take seconds."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = character_tokenizer("0123456789+-=")
    save_pretrained(folder, tiny_qwen2(tokenizer, hidden=16, layers=1, heads=2), tokenizer)
    return folder


@pytest.fixture
def problems(tmp_path):
    """Prompts with answers."""
    return _written(tmp_path / "problems.jsonl", [{"prompt": p, "answer": answer} for p, answer in PROBLEMS])


@pytest.fixture
def pairs(tmp_path):
    """Compared completions."""
    rows = [{"prompt": p, "chosen": str(answer), "rejected": str(answer + 1)} for p, answer in PROBLEMS]
    return _written(tmp_path / "pairs.jsonl", rows)


def _written(file, rows):
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return file
