"""Which files a name means: configurations, splits, and files that are no data."""

import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rl_bridge.data.census import SourceCensus
from rl_bridge.data.row_files import files_of
from rl_bridge.data.rows import read_rows

CONFIGURATIONS = ("main", "socratic")
SIZES = {"train": 3, "test": 2}
HEAD = "---\nlicense: mit\n{}---\n# A dataset\n"


def rows_of(name):
    configuration, split = name.split()
    return [{"prompt": f"{configuration} {split} {number}", "answer": "1"} for number in range(SIZES[split])]


def prompts(source):
    return [row["prompt"] for row in read_rows(str(source), fields=())]


def expected(*names):
    return [row["prompt"] for name in names for row in rows_of(name)]


def parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def head_of(configurations, form="split and path", default=None):
    """The YAML head that names the files of each configuration, in one of the forms of ``data_files``."""
    text = "configs:\n"
    for name in configurations:
        text += f"- config_name: {name}\n"
        text += "  default: true\n" if name == default else ""
        if form == "split and path":
            text += "  data_files:\n" + "".join(f"  - split: {s}\n    path: {name}/{s}-*\n" for s in SIZES)
        elif form == "lists of paths":
            text += "  data_files:\n" + "".join(
                f"  - split: {s}\n    path:\n    - {name}/{s}-*.parquet\n" for s in SIZES
            )
        elif form == "data_dir":
            text += f"  data_dir: {name}\n"
        elif form == "a pattern":
            text += f"  data_files: {name}/train-*\n"
        else:
            text += f"  data_files:\n  - {name}/train-*\n"
    return HEAD.format(text)


@pytest.fixture
def folder(tmp_path):
    """A clone of a dataset with two configurations of two splits, without its README.md."""
    for name in CONFIGURATIONS:
        for split in SIZES:
            parquet(tmp_path / "gsm" / name / f"{split}-00000-of-00001.parquet", rows_of(f"{name} {split}"))
    return tmp_path / "gsm"


FORMS = ("none", "split and path", "lists of paths", "data_dir", "a pattern", "patterns")


@pytest.mark.parametrize("form", FORMS)
def test_a_configuration_of_a_folder_is_read_alone_and_two_are_never_mixed_unasked(folder, form):
    if form != "none":
        (folder / "README.md").write_text(head_of(CONFIGURATIONS, form))
    for name in CONFIGURATIONS:
        for split in SIZES:
            if "pattern" in form and split == "test":
                with pytest.raises(ValueError, match=f"configuration '{name}' has no split 'test'; it has 'train'"):
                    prompts(f"{folder / name}@test")
            else:
                assert prompts(f"{folder / name}@{split}") == expected(f"{name} {split}")
        assert prompts(f"{folder / name}@train[1:]") == expected(f"{name} train")[1:]
    for source in (folder, f"{folder}@train"):
        with pytest.raises(ValueError, match=r"main, socratic, which are not mixed unasked: name one, as .*main@train"):
            prompts(source)
    with pytest.raises(ValueError, match=r"not mixed unasked|has no split 'main'"):
        prompts(f"{folder}@main")
    if form == "none":
        for source in (folder / "main", f"{folder}@main"):
            with pytest.raises(ValueError, match=r"has 2 splits, train, test, .*name one, as .*main@train"):
                prompts(source)
        assert prompts(f"{folder}@train[:]") == expected("main train", "socratic train")
        assert len(prompts(f"{folder}@[:]")) == 10
    else:
        assert prompts(folder / "main") == expected("main train")


def test_the_only_configuration_and_the_default_one_are_read_as_the_hub_does(folder):
    (folder / "README.md").write_text(head_of(CONFIGURATIONS[:1]))
    assert prompts(folder) == expected("main train") and prompts(f"{folder}@test") == expected("main test")
    (folder / "README.md").write_text(head_of(CONFIGURATIONS, default="socratic"))
    assert prompts(folder) == expected("socratic train")
    with pytest.raises(ValueError, match="the configuration 'socratic' has no split 'dev'; it has 'train', 'test'"):
        prompts(f"{folder}@dev")


def test_a_configuration_may_lie_elsewhere_than_in_a_folder_of_its_name(folder):
    entries = [
        "config_name: easy\n  data_files: socratic/**\n",
        "config_name: hard\n  data_files: [main/t*, main/t*]\n",
    ]
    text = "configs:\n" + "".join(f"- {entry}" for entry in entries)
    (folder / "README.md").write_text(HEAD.format(text))
    assert prompts(folder / "easy") == expected("socratic test", "socratic train")
    assert prompts(folder / "hard") == expected("main test", "main train"), "each file once"


BAD = {
    "configs: [main]\n": "README.md: configs in its YAML head cannot be read",
    "configs: {a: [}\n": "README.md: configs in its YAML head cannot be read",
    "configs: [{config_name: a, data_files: [{split: train}]}]\n": "need a split and a path, got {'split': 'train'}",
    "configs: [{config_name: a, data_files: 3}]\n": "need a split and a path, got 3",
    "configs: [{config_name: a, data_files: absent/*}]\n": "names 'absent/.' for 'a', and there is no such file",
    "configs: [{config_name: a, data_files: ../x/*}]\n": "'../x/.' of 'a' is not in the folder",
    "configs: [{config_name: a, data_files: 'hf://x/y'}]\n": "'hf://x/y' of 'a' is not in the folder",
    "configs: [{config_name: a, data_files: README.*}]\n": r"a file of 'a', does not end in \.json",
}


@pytest.mark.parametrize("head", BAD)
def test_a_head_that_cannot_be_read_is_refused_with_its_file(folder, head):
    (folder / "README.md").write_text(HEAD.format(head))
    with pytest.raises(ValueError, match=BAD[head]):
        prompts(folder)


@pytest.mark.parametrize(
    "text", ["", "# Rows\n", "---\nlicense: mit\n---\n", "---\nconfigs: later\n", "---\nconfigs:\n---\n"]
)
def test_a_page_without_configurations_changes_nothing(tmp_path, text):
    lines(tmp_path / "rows.jsonl", rows_of("a train"))
    (tmp_path / "README.md").write_text(text)
    assert prompts(tmp_path) == expected("a train")


NO_DATA = {
    "README.md": "# Rows",
    "LICENSE.txt": "free",
    ".gitattributes": "*.parquet filter=lfs",
    "dataset_info.json": '{"features": {}}',
    "dataset_infos.json": '\ufeff {"main": {}}',
    "nested/state.json": '{"_data_files": []}',
    "nested/cache-1234.arrow": "cache of datasets",
    ".git/rows.jsonl": '{"prompt": "no"}',
    ".cache/huggingface/rows.json": "[]",
    ".ipynb_checkpoints/a-checkpoint.jsonl": '{"prompt": "no"}',
    "._a.jsonl": "\0\0",
    "__MACOSX/a.jsonl": '{"prompt": "no"}',
    "__pycache__/a.csv": "prompt\nno\n",
}


@pytest.mark.parametrize("name", NO_DATA)
def test_what_is_no_data_is_not_read_and_not_counted(tmp_path, name):
    lines(tmp_path / "a.jsonl", rows_of("a train"))
    lines(tmp_path / "nested" / "b.jsonl", rows_of("b train"))
    for written in (name, *(["nested/state.json"] if "cache-" in name else [])):
        (tmp_path / written).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / written).write_text(NO_DATA[written])
    census = SourceCensus()
    rows = read_rows(str(tmp_path), fields=(), census=census)
    assert [row["prompt"] for row in rows] == expected("a train", "b train")
    assert (census.files, census.read) == (2, 6)


def test_rows_in_a_file_of_such_a_name_are_rows(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps(rows_of("a train")))
    assert prompts(tmp_path) == expected("a train")


def test_a_saved_dataset_in_a_folder_is_its_arrow_files(tmp_path):
    saved = datasets.Dataset.from_list(rows_of("a train"))
    saved.save_to_disk(tmp_path / "rows" / "one")
    (tmp_path / "rows" / "one" / "cache-12.arrow").write_text("x")
    assert prompts(tmp_path / "rows") == expected("a train")
    assert files_of(str(tmp_path / "rows" / "one")) is None


HUB = {
    "org/name": ("org/name",),
    "org/name/main": ("org/name", "main"),
    "org/name/main@test": ("org/name", "main"),
    "org/name/main:test": ("org/name", "main"),
    "org/name/main@test[:5%]": ("org/name", "main"),
    "name": ("name",),
    "/absent/org/name": ("/absent/org/name",),
    "./org/name": ("./org/name",),
}


@pytest.mark.parametrize("source", HUB)
def test_a_configuration_of_the_hub_follows_the_name(monkeypatch, source):
    calls = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *words, split: calls.append((words, split)) or rows_of("a test")
    )
    assert prompts(source) == expected("a test")
    split = "test[:5%]" if "%" in source else "test" if "test" in source else "train"
    assert calls == [(HUB[source], split)]


def test_several_configurations_of_the_hub_are_refused_with_their_names(monkeypatch, folder):
    """The error is the one of ``datasets`` itself, for a folder in the place of the hub's."""
    (folder / "README.md").write_text(head_of(CONFIGURATIONS))
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: load(str(folder), split=split))
    with pytest.raises(ValueError, match=r"'main', 'socratic', which are not mixed unasked.* as org/gsm/main@test"):
        prompts("org/gsm@test")
