"""The record of a run, written again for other programs."""

import json
import sys
import types
from dataclasses import dataclass

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_bridge.cli import main
from rl_bridge.tracking.run import Run


@dataclass(frozen=True)
class Options:
    rate: float = 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("exporting") / "run"
    with Run(made, Options()) as run:
        for stage, steps in (("sft", 2), ("policy", 3)):
            for step in run.steps(stage, steps, state={}):
                run.log(step, {"reward": step / 2}, tokens=7)
    return made


def test_event_files_have_the_steps_and_their_times_and_are_replaced(folder, tmp_path, capsys):
    words = ["export-metrics", str(folder), "--to", "tensorboard", "--output", str(tmp_path)]
    assert main(words) == main(words) == 0
    assert capsys.readouterr().out.splitlines() == [f"exported 5 records of {folder} to {tmp_path}"] * 2
    [events] = tmp_path.glob("run-*/events.out*")
    accumulator = EventAccumulator(str(events)).Reload()
    times = [json.loads(line)["time"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = accumulator.Scalars("policy/reward")
    assert [(event.step, event.value) for event in rewards] == [(2, 0.0), (3, 0.5), (4, 1.0)]
    assert [event.wall_time for event in rewards] == pytest.approx(times[2:])
    assert {"sft/seconds", "sft/trained_tokens", "policy/tokens_per_second"} <= set(accumulator.Tags()["scalars"])


class Recorded:
    """What Weights & Biases would get."""

    def __init__(self, **place):
        self.place, self.logged, self.ended = place, [], False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.ended = True

    def log(self, metrics, step):
        self.logged.append((step, metrics))


def test_weights_and_biases_gets_every_step_under_one_id(folder, tmp_path, monkeypatch):
    runs = []
    module = types.SimpleNamespace(init=lambda **place: runs.append(Recorded(**place)) or runs[-1])
    monkeypatch.setitem(sys.modules, "wandb", module)
    words = ["export-metrics", str(folder), "--to", "wandb", "--output", str(tmp_path / "w"), "--project", "mine"]
    assert main(words) == main(words) == 0
    first, second = runs
    assert first.place == second.place and first.ended and second.ended
    assert first.place["project"] == "mine" and first.place["id"].startswith("run-")
    assert first.place["config"] == {"rate": 0.5} and first.place["dir"] == str(tmp_path / "w")
    assert [step for step, _ in first.logged] == list(range(5))
    assert first.logged[4][1]["policy/reward"] == 1.0 and first.logged[4][1]["time"] > 1.7e9


def test_what_is_no_run_and_what_is_not_installed_is_said_in_one_line(folder, tmp_path, monkeypatch, capsys):
    assert main(["export-metrics", str(tmp_path), "--to", "tensorboard"]) == 1
    assert "has no metrics.jsonl: it is not a run's folder" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["export-metrics", str(folder), "--to", "wandb", "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("wandb is not installed: pip install 'rl-fn[wandb]'\n")
