"""What trials read of the hub by its name is compared as files are, when a study goes on and at its end."""

import hashlib
from fnmatch import fnmatch
from pathlib import Path

import datasets
import pytest

from rl_bridge.models import model_folder
from rl_tools.tune.contents import contents
from rl_tools.tune.journal import CONTENTS, JOURNAL, read_journal
from rl_tools.tune.tune_command import run

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1), "source": {"page": number}} for number in range(4)]
NAMES = ("org/rows", "org/more", "org/rows/main", "org/tiny", "org/other")
REPOSITORY = (
    *("README.md", "LICENSE", "config.json", "model.safetensors", "pytorch_model.bin", "consolidated.pth"),
    *("tokenizer.json", "tokenizer.model", "merges.txt", "LICENSE.txt", "chat_template.jinja", "model.gguf"),
)


class Hub:
    """What the libraries of the hub return, without the hub: rows by name and split, snapshots by name.

    A snapshot has links to files that are named by their contents, of all that anyone has fetched of a revision.
    """

    def __init__(self, folder):
        self.folder, self.revision = folder, dict.fromkeys(NAMES, 0)
        self.contents = dict.fromkeys(NAMES, 0)
        self.down = False

    def load_dataset(self, *words, split):
        self.require("/".join(words))
        return datasets.Dataset.from_list([*ROWS, {**ROWS[0], "prompt": f"{self.contents['/'.join(words)]}, {split}"}])

    def snapshot_download(self, name, allow_patterns=("*",), **_):
        self.require(name)
        folder, blobs = self.folder / name / "snapshots" / str(self.revision[name]), self.folder / name / "blobs"
        for path in (folder, blobs):
            path.mkdir(parents=True, exist_ok=True)
        for file in (file for file in REPOSITORY if any(fnmatch(file, pattern) for pattern in allow_patterns)):
            number = self.revision[name] if file == "README.md" else self.contents[name]
            text = f'{{"hidden_size": {8 + number}, "of": "{file}"}}'
            blob = blobs / hashlib.sha256(text.encode()).hexdigest()
            blob.write_text(text)
            (folder / file).unlink(missing_ok=True)
            (folder / file).symlink_to(blob)
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


@pytest.mark.long
@pytest.mark.parametrize("read", READ)
def test_a_study_goes_on_with_what_the_hub_had_when_it_began(read, hub):
    """It went on with other rows and other weights, and compared their trials with the earlier ones."""
    name, words = READ[read]
    run(study(*words))
    for fetches in (False, True):
        hub.revision[name] += 1  # another README, the same rows and weights
        run([*study(*words), "--resume"])
        for model in NAMES[-2:] * fetches:  # as vLLM or a person does
            hub.snapshot_download(model)
    run([*study(*words), "--resume"])
    hub.contents[name] += 1
    with pytest.raises(
        ValueError, match=rf"is another study: the content of the (rows of|model) {name}\S* was \w+ and is \w+\. Give"
    ):
        run([*study(*words), "--resume"])


@pytest.mark.parametrize("kind", ["dataset", "model"])
def test_a_folder_of_the_hub_s_cache_counts_by_what_it_is_for(kind, tmp_path):
    """All files of rows, which are of any kind; of a model those that a model is read from: others fetch the rest."""
    folder, blobs = tmp_path / "snapshots" / "1", tmp_path / "blobs"
    for path in (folder, blobs):
        path.mkdir(parents=True)

    def put(name, text):
        blob = blobs / hashlib.sha256(text.encode()).hexdigest()
        blob.write_text(text)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(blob)
        return contents(["--data", str(folder)], [], [])

    names = ("train.jsonl", "LICENSE.txt", "model.gguf")
    if kind == "model":
        names = ("config.json", "merges.txt", "model.safetensors")
        put("config.json", "{}")
    before = put("README.md", "{}")
    for name in names:
        one, other = put(name, "{ }"), put(name, "{  }")
        assert before != one != other and list(one) == list(before)
        before = other
    for name in {"dataset": ["README.md"], "model": ["README.md", "LICENSE.txt", "model.gguf"]}[kind]:
        assert put(name, "{   }") == before


@pytest.mark.parametrize("words", [["--data", "org/absent"], ["--model", "org/absent"]], ids=["rows", "model"])
def test_what_the_hub_does_not_have_is_refused_before_a_folder_is_made(words, hub, tmp_path):
    with pytest.raises(ValueError, match=r"org/absent.*no org/absent within reach"):
        run(study(*words))
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
@pytest.mark.parametrize("change", ["rows", "model", "file", "the hub is gone", "nothing"])
def test_what_changed_while_trials_ran_is_named_at_the_end(change, hub, monkeypatch, capsys):
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')

    def to_its_end(journal, study):
        hub.contents["org/rows"] += change == "rows"
        hub.contents["org/tiny"] += change == "model"
        Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * (1 + (change == "file")))
        hub.down = change == "the hub is gone"
        if not hub.down:
            hub.snapshot_download("org/tiny", ["*"])  # as trials do, with the tokenizer's files and others

    monkeypatch.setattr("rl_tools.tune.study._to_its_end", to_its_end)
    run(study("--data", "org/rows", "--eval-data", "rows.jsonl", "--model", "org/tiny"))
    printed = capsys.readouterr().out
    name = {"rows": "the rows of org/rows", "model": "the model org/tiny", "file": "rows.jsonl"}.get(change)
    assert (f"the content of {name} changed while trials ran" in printed) == (name is not None)
    assert printed.count("changed while") == (name is not None)
    assert ("cannot be compared" in printed and "no org/" in printed) == (change == "the hub is gone")


def test_a_model_and_rows_of_one_name_are_two_things(hub):
    """The hub has models and datasets apart: a changed dataset went unseen beside a model of its name."""
    words = study("--model", "org/rows", "--data", "org/rows@test")
    names = [line for line in contents_of(hub, words) if "org/rows" in line]
    assert names == ["the content of the model org/rows", "the content of the rows of org/rows@test"]


@pytest.mark.long
@pytest.mark.parametrize("word", ["model:judge", "model:./judge", "learned=model:judge"])
def test_a_judge_in_a_folder_is_compared_however_its_word_looks(hub, word):
    Path("judge").mkdir()
    Path("judge", "config.json").write_text('{"hidden_size": 8}')
    words = study("--reward", word)
    before = contents_of(hub, words)
    assert list(before) == ["the content of judge"]
    Path("judge", "config.json").write_text('{"hidden_size": 9}')
    with pytest.raises(ValueError, match="the content of judge was"):
        run([*words, "--resume"])


def contents_of(hub, words):
    """What the journal of a study has of contents."""
    run(words)
    (event, *_), _ = read_journal(hub.folder.parent / "runs" / "tune" / JOURNAL)
    return {name: value for name, value in event.items() if name.startswith(CONTENTS)}
