"""What trials read of the hub by its name is compared as files are, when a study goes on and at its end."""

from pathlib import Path

import datasets
import pytest

from rl_bridge.models import model_folder
from rl_tools.tune.tune_command import run

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1), "source": {"page": number}} for number in range(4)]
NAMES = ("org/rows", "org/more", "org/rows/main", "org/tiny", "org/other")


class Hub:
    """What the libraries of the hub return, without the hub: rows by name and split, snapshots by name."""

    def __init__(self, folder):
        self.folder, self.revision = folder, dict.fromkeys(NAMES, 0)
        self.contents = dict.fromkeys(NAMES, 0)
        self.down = False

    def load_dataset(self, *words, split):
        self.require("/".join(words))
        return datasets.Dataset.from_list([*ROWS, {**ROWS[0], "prompt": f"{self.contents['/'.join(words)]}, {split}"}])

    def snapshot_download(self, name, **_):
        self.require(name)
        folder = self.folder / name / str(self.revision[name])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(f'{{"hidden_size": {8 + self.contents[name]}}}')
        return str(folder)

    def require(self, name):
        if self.down or name not in NAMES:
            raise ConnectionError(f"no {name} within reach")


READ = {
    "rows": ("org/rows", ["--data", "org/rows"]),
    "rows of a split": ("org/rows", ["--data", "org/rows@test"]),
    "rows of a configuration": ("org/rows/main", ["--data=org/rows/main@test[:4]"]),
    "held-out rows": ("org/more", ["--data", "org/rows", "--eval-data", "org/more"]),
    "rows that are searched": ("org/more", ["--space.data", "org/rows,org/more"]),
    "model": ("org/tiny", ["--model", "org/tiny"]),
    "models that are searched": ("org/tiny", ["--space.model", "org/other,org/tiny"]),
    "critic": ("org/tiny", ["objective:ppo", "--critic.model", "org/tiny"]),
    "reward model": ("org/tiny", ["--reward", "learned=model:org/tiny"]),
}
"""What lies on the hub, and the words that name it."""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    of_test = Hub(tmp_path / "hub")
    monkeypatch.setattr(datasets, "load_dataset", of_test.load_dataset)
    monkeypatch.setattr(model_folder, "snapshot_download", of_test.snapshot_download)
    monkeypatch.setattr("rl_tools.tune.study._to_its_end", lambda journal, study: None)
    monkeypatch.setattr("rl_tools.tune.study_report.write_report", lambda folder: [])
    return of_test


def study(*words):
    return ["policy", "--space.policy.steps", "1..3", *words]


@pytest.mark.parametrize("read", READ)
def test_a_study_goes_on_with_what_the_hub_had_when_it_began(read, hub):
    """It went on with other rows and other weights, and compared their trials with the earlier ones."""
    name, words = READ[read]
    run(study(*words))
    hub.revision[name] += 1
    run([*study(*words), "--resume"])  # another README, the same rows and weights
    hub.contents[name] += 1
    with pytest.raises(ValueError, match=rf"is another study: the content of {name}\S* was \w+ and is \w+\. Give"):
        run([*study(*words), "--resume"])


@pytest.mark.parametrize("words", [["--data", "org/absent"], ["--model", "org/absent"]], ids=["rows", "model"])
def test_what_the_hub_does_not_have_is_refused_before_a_folder_is_made(words, hub, tmp_path):
    with pytest.raises(ValueError, match=r"org/absent.*no org/absent within reach"):
        run(study(*words))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("change", ["rows", "model", "file", "the hub is gone", "nothing"])
def test_what_changed_while_trials_ran_is_named_at_the_end(change, hub, monkeypatch, capsys):
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')

    def to_its_end(journal, study):
        hub.contents["org/rows"] += change == "rows"
        hub.contents["org/tiny"] += change == "model"
        Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * (1 + (change == "file")))
        hub.down = change == "the hub is gone"

    monkeypatch.setattr("rl_tools.tune.study._to_its_end", to_its_end)
    run(study("--data", "org/rows", "--eval-data", "rows.jsonl", "--model", "org/tiny"))
    printed = capsys.readouterr().out
    name = {"rows": "org/rows", "model": "org/tiny", "file": "rows.jsonl"}.get(change)
    assert (f"the content of {name} changed while trials ran" in printed) == (name is not None)
    assert printed.count("changed while") == (name is not None)
    assert ("cannot be compared" in printed and "no org/" in printed) == (change == "the hub is gone")
