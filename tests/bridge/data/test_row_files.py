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


def tree(folder, names):
    """Files of one row each, the row's prompt being the file's name; a value is what a link points to."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {"prompt": name, "answer": "1"}
        if path.suffix == ".arrow":
            with pyarrow.ipc.new_stream(path, (table := pyarrow.Table.from_pylist([row])).schema) as stream:
                stream.write_table(table)
        elif path.suffix == ".parquet":
            parquet(path, [row])
        elif path.suffix == ".csv":
            path.write_text(f"prompt,answer\n{name},1\n")
        elif path.suffix == ".json":
            path.write_text(json.dumps([row]))
        else:
            lines(path, [row])
    return folder


PARTS = ("", "[:100]", "[-100:]", "[0:]", "[:-1]")


@pytest.mark.parametrize("part", PARTS)
def test_a_part_asks_for_no_mixture(folder, part):
    for source in (f"{folder}@train{part}", f"{folder / 'main'}@{part}" if part else folder / "main"):
        with pytest.raises(ValueError, match="not mixed unasked"):
            prompts(source)
    assert len(prompts(f"{folder / 'main'}@[:]")) == 5


SPLIT_PAIRS = {
    "behind": ("gsm8k_train.jsonl", "gsm8k_test.jsonl"),
    "folders": ("train_data/a.jsonl", "test_data/a.jsonl"),
    "longer words": ("training/a.jsonl", "testing/a.jsonl"),
    "evaluation": ("a.train.csv", "a.evaluation.csv"),
    "hub's parquet": ("main/partial-train/0000.parquet", "main/partial-test/0000.parquet"),
    "cache": ("gsm8k-train.arrow", "gsm8k-test.arrow"),
    "numbers": ("train0.json", "test0.json"),
    "capitals": ("Train.jsonl", "Test.jsonl"),
    "in the middle": ("my train set/a.jsonl", "my dev set/a.jsonl"),
    "one without": ("train.jsonl", "rows.jsonl"),
}


@pytest.mark.parametrize("kind", SPLIT_PAIRS)
def test_a_split_is_known_by_its_word_wherever_it_is_in_a_name(tmp_path, kind):
    names = SPLIT_PAIRS[kind]
    tree(tmp_path, names)
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "cache-12.arrow").write_text("no data")
    with pytest.raises(ValueError, match=r"not mixed unasked.*name .*@(train|main@train)"):
        prompts(tmp_path)
    assert prompts(f"{tmp_path}@train") == [names[0]]
    other = next((word for word in ("testing", "dev", "evaluation", "test") if word in names[1].lower()), None)
    if other:
        assert prompts(f"{tmp_path}@{other}") == prompts(f"{tmp_path}@{other}[:5]") == [names[1]]
    assert sorted(prompts(f"{tmp_path}@[:]")) == sorted(names)


@pytest.mark.parametrize(
    "name", ["trainer.jsonl", "pretrain.jsonl", "latest.jsonl", "contest/a.jsonl", "devices.jsonl"]
)
def test_a_word_within_another_is_no_split(tmp_path, name):
    assert prompts(tree(tmp_path, [name, "rows.jsonl"])) == sorted([name, "rows.jsonl"])


def test_one_word_stands_for_another_where_no_file_has_it(tmp_path):
    tree(tmp_path, ["training.jsonl", "val.jsonl", "dev.jsonl"])
    assert prompts(f"{tmp_path}@train") == ["training.jsonl"] and prompts(f"{tmp_path}@val") == ["val.jsonl"]
    with pytest.raises(ValueError, match=r"has 2 splits, val, dev, .*@val"):
        prompts(f"{tmp_path}@validation")


TWICE = {
    "a folder below": (("train.jsonl", "old/train.jsonl"), "old, .* itself .*as .*old@train"),
    "shards below": (("train.jsonl", "data/train-00000-of-00001.parquet"), "data, .* itself .*as .*data@train"),
    "no exact name": (("train_sft-0.jsonl", "train_gen-0.jsonl"), "train_gen, train_sft, .*@train_gen"),
    "before the word": (("a_train.jsonl", "b_train.jsonl"), "a_train, b_train, .*@a_train"),
    "sizes": (("train_1k.jsonl", "train_5k.jsonl"), "train_1k, train_5k, .*@train_1k"),
    "a folder and a file": (("train/a.jsonl", "train.jsonl"), "the folder .*train and the file .*train.jsonl"),
    "two suffixes": (("train.jsonl", "train.parquet"), "train.jsonl and .*train.parquet are two forms"),
    "another cut": (
        ("train-00000-of-00001.csv", "train-00000-of-00002.csv", "train-00001-of-00002.csv"),
        "of-00001.csv and .*00000-of-00002.csv are two forms",
    ),
    "cut and whole": (("train.csv", "train-00000-of-00001.parquet"), "are two forms"),
}


@pytest.mark.parametrize("kind", TWICE)
@pytest.mark.parametrize("split", ["", "@train", "@train[:9]"])
def test_rows_that_may_be_there_twice_are_named(tmp_path, kind, split):
    names, message = TWICE[kind]
    with pytest.raises(ValueError, match=message):
        prompts(f"{tree(tmp_path, names)}{split}")
    assert sorted(prompts(f"{tmp_path}@train[:]")) == sorted(names)


@pytest.mark.parametrize("copy", ["backup/rows.jsonl", "rows copy.jsonl", "rows.json"])
def test_a_copy_in_the_folder_is_refused(tmp_path, copy):
    lines(tmp_path / "rows.jsonl", rows_of("main train"))
    (tmp_path / copy).parent.mkdir(exist_ok=True)
    (tmp_path / copy).write_bytes((tmp_path / "rows.jsonl").read_bytes())
    with pytest.raises(ValueError, match=r"same content, so that each row is there twice|two forms of one name"):
        prompts(tmp_path)
    lines(tmp_path / copy, rows_of("main test"))
    if copy != "rows.json":
        assert sorted(prompts(tmp_path)) == sorted(expected("main train", "main test"))
        (tmp_path / copy).write_bytes((tmp_path / "rows.jsonl").read_bytes())
        assert len(prompts(f"{tmp_path}@[:]")) == 6


@pytest.mark.parametrize("suffixes", [(".jsonl", ".parquet"), (".csv", ".jsonl"), (".arrow", ".json")], ids="".join)
def test_one_name_with_two_suffixes_is_refused(tmp_path, suffixes):
    tree(tmp_path, [f"rows{suffix}" for suffix in suffixes])
    with pytest.raises(ValueError, match=r"rows\{} and .*rows\{} are two forms of one name".format(*suffixes)):
        prompts(tmp_path)
    assert prompts(tmp_path / f"rows{suffixes[0]}") == [f"rows{suffixes[0]}"]


def test_the_name_of_a_split_alone_is_the_split(tmp_path):
    tree(tmp_path, ["train.jsonl", "train_socratic.jsonl"])
    assert prompts(f"{tmp_path}@train") == ["train.jsonl"]
    assert prompts(f"{tmp_path}@train_socratic") == ["train_socratic.jsonl"]
    with pytest.raises(ValueError, match=r"split 'train' and 1 others, as .*train_socratic.jsonl"):
        prompts(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ("train-00000-of-00002.csv", "train-00001-of-00002.csv"),
        ("train-00000-of-00002-0123456789abcdef.csv", "train-00001-of-00002-fedcba9876543210.csv"),
        ("train_part1.csv", "train_part2.csv"),
        ("train1.csv", "train2.csv"),
        ("train/0.csv", "train/1.jsonl"),
        ("train-1/a.csv", "train-2/a.csv"),
    ],
    ids=lambda names: names[0],
)
def test_shards_are_one_split(tmp_path, names):
    tree(tmp_path, names)
    for source in (str(tmp_path), f"{tmp_path}@train", f"{tmp_path}@train[:]"):
        assert prompts(source) == list(names)


UNREAD = (".jsonl.gz", ".json.gz", ".jsonl.zst", ".ndjson", ".tsv", ".csv.bz2", ".jsonl.xz", ".zip", ".xlsx")


@pytest.mark.parametrize("suffix", UNREAD)
def test_rows_without_a_reader_are_refused_and_not_passed_over(tmp_path, suffix):
    tree(tmp_path, ["test.jsonl"])
    (tmp_path / f"train{suffix}").write_bytes(b"rows")
    for source in (tmp_path, f"{tmp_path}@train", f"{tmp_path}@[:]", f"{tmp_path}@train[:9]"):
        with pytest.raises(ValueError, match=rf"train\{suffix} looks like rows and has no reader: unpack"):
            prompts(source)
    assert prompts(f"{tmp_path}@test") == ["test.jsonl"]
    (tmp_path / "train.jsonl").write_text((tmp_path / "test.jsonl").read_text())
    with pytest.raises(ValueError, match="looks like rows"):
        prompts(f"{tmp_path}@train")


@pytest.mark.parametrize("target", ["../elsewhere", ".", "..", "below"])
def test_linked_folders_are_entered_and_no_row_is_read_twice(tmp_path, target):
    tree(tmp_path, ["rows/a.jsonl", "rows/below/b.jsonl", "elsewhere/c.jsonl"])
    (tmp_path / "rows" / "link").symlink_to(target)
    rows = ["rows/a.jsonl", "rows/below/b.jsonl", *(["elsewhere/c.jsonl"] if "elsewhere" in target else [])]
    assert prompts(tmp_path / "rows") == rows
    text = "configs:\n- config_name: default\n  data_files: '**/*.jsonl'\n"
    (tmp_path / "rows" / "README.md").write_text(HEAD.format(text))
    assert sorted(set(prompts(tmp_path / "rows"))) == sorted(
        {*rows, *(["elsewhere/c.jsonl"] if target == ".." else [])}
    )
    assert len(prompts(tmp_path / "rows")) == len(set(prompts(tmp_path / "rows")))


def test_a_link_to_nothing_is_refused(tmp_path):
    tree(tmp_path, ["a.jsonl"])
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "absent.jsonl")
    with pytest.raises(FileNotFoundError, match=r"b.jsonl is a link to a file that is not there"):
        prompts(tmp_path)


def test_patterns_are_of_the_data_dir(folder):
    text = "configs:\n- config_name: easy\n  data_dir: {}\n  data_files:\n  - split: train\n    path: train-*\n"
    (folder / "README.md").write_text(HEAD.format(text.format("socratic")))
    assert prompts(folder) == expected("socratic train")
    (folder / "README.md").write_text(HEAD.format(text.format("../gsm/main")))
    with pytest.raises(ValueError, match=r"'../gsm/main' of 'easy' is not in the folder"):
        prompts(folder)


def test_two_entries_of_one_split_are_refused_as_datasets_does(folder):
    entries = "".join(f"  - split: train\n    path: {name}/train-*\n" for name in CONFIGURATIONS)
    (folder / "README.md").write_text(HEAD.format(f"configs:\n- config_name: easy\n  data_files:\n{entries}"))
    with pytest.raises(ValueError, match="data_files of 'easy' have two entries of the split 'train'"):
        prompts(folder)
    with pytest.raises(ValueError, match="duplicate"):
        datasets.load_dataset(str(folder))
