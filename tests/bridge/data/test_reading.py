import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rl_bridge.data.rows import read_rows

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(1, 6)] + [{"prompt": 'say "é,\n"', "answer": "é"}]
CHAT = [{"prompt": [{"role": "user", "content": f"{i}+{i}"}], "answer": str(2 * i)} for i in range(3)]


def write_json(path, rows):
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")


def write_jsonl(path, rows):
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")


def write_csv(path, rows):
    quoted = [",".join('"' + value.replace('"', '""') + '"' for value in row.values()) for row in rows]
    path.write_text("\r\n".join([",".join(rows[0]), *quoted]), encoding="utf-8", newline="")


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_arrow_file(path, rows):
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def write_arrow_stream(path, rows):
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def write_saved_dataset(path, rows):
    datasets.Dataset.from_list(rows).save_to_disk(path)


FORMATS = {
    "rows.json": write_json,
    "rows.jsonl": write_jsonl,
    "rows.csv": write_csv,
    "rows.parquet": write_parquet,
    "file.arrow": write_arrow_file,
    "stream.arrow": write_arrow_stream,
    "UPPER.JSONL": write_jsonl,
    "saved": write_saved_dataset,
}


def without_place(rows):
    return [{name: value for name, value in row.items() if name != "_where"} for row in rows]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path, name):
    path = tmp_path / name
    FORMATS[name](path, ROWS)
    assert without_place(read_rows(str(path), fields=("prompt", "answer"))) == ROWS


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"rows.csv"}))
def test_chat_messages_in_every_format_but_csv(tmp_path, name):
    path = tmp_path / name
    FORMATS[name](path, CHAT)
    assert without_place(read_rows(str(path), fields=("prompt", "answer"))) == CHAT


def test_a_row_knows_its_file_and_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, ROWS)  # an empty line after each
    assert [row["_where"] for row in read_rows(str(path))] == [f"{path}, row {n}" for n in (1, 3, 5, 7, 9, 11)]


def test_a_byte_order_mark_is_no_part_of_the_first_field(tmp_path):
    for name in ("rows.csv", "rows.jsonl", "rows.json"):
        path = tmp_path / name
        FORMATS[name](path, ROWS)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert without_place(read_rows(str(path), fields=("prompt", "answer"))) == ROWS


@pytest.mark.parametrize("value", [0, 0.0, False])
def test_a_false_value_is_no_missing_one(tmp_path, value):
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"prompt": "a", "answer": value}])
    assert read_rows(str(path), fields=("prompt", "answer"))[0]["answer"] == value


GOOD = '{"prompt": "1+1=", "answer": "2"}'
BAD = {
    "missing field": (
        "rows.jsonl",
        f'{GOOD}\n{{"prompt": "a"}}',
        r"row 2: field 'answer' is missing; the row has \['prompt'\]",
    ),
    "empty field": ("rows.jsonl", '{"prompt": "", "answer": "2"}', "row 1: 'prompt' is empty text"),
    "null field": ("rows.jsonl", '{"prompt": "a", "answer": null}', "row 1: 'answer' is null"),
    "no messages": ("rows.jsonl", '{"prompt": [], "answer": "2"}', "row 1: 'prompt' is an empty list"),
    "a key twice": (
        "rows.jsonl",
        f'{GOOD}\n{{"prompt": "a", "answer": "2", "prompt": "b"}}',
        "row 2: the key 'prompt' is there twice",
    ),
    "a key twice in a message": (
        "rows.jsonl",
        f'{GOOD}\n{GOOD}\n{{"prompt": [{{"role": "user", "role": "user", "content": "a"}}], "answer": "2"}}',
        "row 3: the key 'role' is there twice",
    ),
    "a key twice in json": (
        "rows.json",
        f'[{GOOD}, {GOOD}, {{"prompt": "a", "prompt": "b", "answer": "2"}}]',
        "row 3: the key 'prompt' is there twice",
    ),
    "not an object": (
        "rows.jsonl",
        f"{GOOD}\n[1, 2]",
        "row 2: expected an object with fields prompt, answer, got list",
    ),
    "not an object in json": ("rows.json", f'[{GOOD}, "a"]', "row 2: expected an object with fields.*got str"),
    "number as prompt": ("rows.jsonl", '{"prompt": 5, "answer": "2"}', "row 1: prompt must be text or messages.*got 5"),
    "messages without role": (
        "rows.jsonl",
        f'{GOOD}\n{{"prompt": [{{"content": "a"}}], "answer": "2"}}',
        "row 2: prompt must be text or messages with role and content",
    ),
    "invalid line": ("rows.jsonl", f"{GOOD}\n{GOOD}\n{{'prompt'}}", "row 3: not valid JSON: .*"),
    "invalid file": ("rows.json", "{", "not valid JSON: "),
    "object as file": ("rows.json", GOOD, r"expected a list of rows, got dict \(one row a line is \.jsonl\)"),
    "a row a line": ("rows.json", f"{GOOD}\n{GOOD}", r"not valid JSON: Extra data.* \(one row a line is \.jsonl\)"),
    "ragged, short": ("rows.csv", "prompt,answer\na,b\nc", "row 2: expected 2 columns as in the header line"),
    "ragged, long": ("rows.csv", "prompt,answer\na,b,c", "row 1: expected 2 columns as in the header line"),
    "open quote": ("rows.csv", 'prompt,answer\na,b\n"c,d', "row 2: not valid CSV: unexpected end of data"),
    "csv without a field": (
        "rows.csv",
        "prompt,solution\na,b",
        "row 1: field 'answer' is missing; the row has",
    ),
    "empty jsonl": ("rows.jsonl", "\n", "has no rows"),
    "empty json": ("rows.json", "[]", "has no rows"),
    "empty csv": ("rows.csv", "", "has no rows"),
    "header alone": ("rows.csv", "prompt,answer\n", "has no rows"),
    "no parquet": ("rows.parquet", "prompt", "cannot be read as parquet"),
    "no arrow": ("rows.arrow", "prompt", "cannot be read as arrow"),
    "utf-16 lines": (
        "rows.jsonl",
        f"{GOOD}\n{GOOD}\n".encode("utf-16"),
        "it is UTF-16-LE and not UTF-8: save it as UTF-8",
    ),
    "a reader's file": ("rows.py", GOOD, r"its kind is not known; a reader of rows in Python is FILE\.py:function"),
    "latin-1 line": (
        "rows.jsonl",
        f"{GOOD}\n".encode() + b'{"prompt": "\xe9"}',
        "row 2: not valid JSON: 'utf-8' codec",
    ),
    "latin-1 json": ("rows.json", b'["\xe9"]', "not valid JSON: 'utf-8' codec"),
    "latin-1 csv": ("rows.csv", b"prompt,answer\na,b\n\xe9,c", "row 2: not valid CSV: 'utf-8' codec"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_input_is_named_with_file_and_row(tmp_path, case):
    name, content, message = BAD[case]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as raised:
        read_rows(str(path), fields=("prompt", "answer"))
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("begin", ["<!DOCTYPE html>\n<html>", "\n  <!doctype HTML>", "\ufeff<html lang='en'>"])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.csv", "rows.parquet", "rows.arrow"])
def test_a_page_of_html_is_named_as_that_whatever_the_file_is_called(name, begin, tmp_path):
    (tmp_path / name).write_text(f"{begin}<head><title>Sign in</title></head><body>a,b</body></html>\n", "utf-8")
    with pytest.raises(ValueError, match="is a page of HTML") as refused:
        read_rows(str(tmp_path / name))
    assert str(refused.value).startswith(str(tmp_path / name)) and "resolve" in str(refused.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file: .*absent\.jsonl"):
        read_rows(str(tmp_path / "absent.jsonl"))


def test_a_row_of_a_saved_dataset_is_checked_too(tmp_path):
    write_saved_dataset(tmp_path / "saved", [*ROWS, {"prompt": "a", "answer": ""}])
    with pytest.raises(ValueError, match="saved, row 7: 'answer' is empty text"):
        read_rows(str(tmp_path / "saved"), fields=("prompt", "answer"))


def test_a_dataset_by_name_and_split(monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: asked.append((name, split)) or ROWS)
    assert without_place(read_rows("org/name")) == ROWS
    assert read_rows("org/name:test")[1]["_where"] == "org/name:test, row 2"
    assert asked == [("org/name", "train"), ("org/name", "test")]


def test_a_dataset_that_does_not_load(monkeypatch):
    def refuse(name, split):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        ValueError, match=r"'rows\.txt' is neither a file \(\.json, .*\) nor a dataset that loads: offline"
    ):
        read_rows("rows.txt")


def test_a_path_and_its_split(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, ROWS)
    assert without_place(read_rows(f"{path}@train")) == ROWS
    part = read_rows(f"{path}@train[1:3]")
    assert without_place(part) == ROWS[1:3] and part[0]["_where"] == f"{path}, row 3"
    assert without_place(read_rows(f"{path}@[-2:]")) == ROWS[-2:]
    with pytest.raises(ValueError, match=r"a file has one split, 'train', or a part as 'train\[10:20\]'; got 'test'"):
        read_rows(f"{path}@test")
    with pytest.raises(FileNotFoundError, match=r"absent\.jsonl@train"):
        read_rows(f"{tmp_path / 'absent.jsonl'}@train")
    write_jsonl(tmp_path / "me@home.jsonl", ROWS)
    assert without_place(read_rows(str(tmp_path / "me@home.jsonl"))) == ROWS
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: asked.append((name, split)) or ROWS)
    read_rows("org/name@test[:5%]")
    assert asked == [("org/name", "test[:5%]")]


def test_a_folder_of_files(tmp_path):
    (tmp_path / "nested").mkdir()
    write_jsonl(tmp_path / "b.jsonl", ROWS[2:4])
    write_parquet(tmp_path / "a.parquet", ROWS[:2])
    write_csv(tmp_path / "nested" / "c.csv", ROWS[4:])
    (tmp_path / "README.md").write_text("not data")
    rows = read_rows(str(tmp_path), fields=("prompt", "answer"))
    assert without_place(rows) == ROWS
    assert rows[-1]["_where"] == f"{tmp_path / 'nested' / 'c.csv'}, row 2"
    assert without_place(read_rows(f"{tmp_path}@[1:4]")) == ROWS[1:4]
    with pytest.raises(ValueError, match=r"has no file of the split 'test' that ends in \.json"):
        read_rows(f"{tmp_path}@test")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no file that ends in \.json, \.jsonl"):
        read_rows(str(tmp_path / "empty"))


def test_the_files_of_a_split_have_its_name_or_its_folder(tmp_path):
    write_parquet(tmp_path / "train-00000-of-00001.parquet", ROWS[:2])
    write_parquet(tmp_path / "test-00000-of-00002.parquet", ROWS[2:3])
    write_parquet(tmp_path / "test-00001-of-00002.parquet", ROWS[3:4])
    write_parquet(tmp_path / "testing.parquet", ROWS[4:])
    (tmp_path / "dev").mkdir()
    write_jsonl(tmp_path / "dev" / "rows.jsonl", ROWS[4:])
    assert without_place(read_rows(f"{tmp_path}@train")) == ROWS[:2]
    assert without_place(read_rows(f"{tmp_path}@test")) == ROWS[2:4]
    assert without_place(read_rows(f"{tmp_path}@test[1:]")) == ROWS[3:4]
    assert without_place(read_rows(f"{tmp_path}@dev")) == ROWS[4:]


def test_the_splits_of_a_saved_dataset(tmp_path):
    parts = {"train": ROWS[:4], "test": ROWS[4:]}
    datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}).save_to_disk(
        tmp_path / "both"
    )
    assert without_place(read_rows(f"{tmp_path / 'both'}")) == ROWS[:4]
    assert without_place(read_rows(f"{tmp_path / 'both'}@test")) == ROWS[4:]
    assert without_place(read_rows(f"{tmp_path / 'both'}@train[:2]")) == ROWS[:2]
    with pytest.raises(ValueError, match="has no split 'dev'; it has 'train', 'test'"):
        read_rows(f"{tmp_path / 'both'}@dev")


def test_many_bad_rows_are_named_up_to_five_and_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([GOOD, "{", *['{"prompt": ""}'] * 8, GOOD]))
    with pytest.raises(ValueError) as raised:
        read_rows(str(path))
    message = str(raised.value)
    assert f"{path}, row 2: not valid JSON" in message and f"{path}, row 6: 'prompt' is empty text" in message
    assert "row 7" not in message and message.endswith("; and 4 more bad rows of 11") and "\n" not in message


def test_messages_of_an_arrow_table_have_no_keys_of_other_messages(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    messages = [{"role": "user", "content": "1+1"}, call, {"role": "tool", "content": "2", "name": "add"}]
    write_parquet(tmp_path / "rows.parquet", [{"messages": messages}])
    (row,) = read_rows(str(tmp_path / "rows.parquet"))
    read = call | {"content": "", "tool_calls": [{"name": "add", "arguments": {}}]}
    assert row["prompt"] == [messages[0], read, messages[2]]


def test_a_part_without_a_number_is_named(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"a part as 'train\[10:20\]'; got 'train\[-:2\]'"):
        read_rows(str(tmp_path / "rows.jsonl") + "@train[-:2]")
    assert len(read_rows(str(tmp_path / "rows.jsonl") + "@train[:-2]")) == len(ROWS) - 2


def test_a_long_cell_is_no_error(tmp_path):
    long = "word " * 50_000
    (tmp_path / "rows.csv").write_text(f"prompt,answer\n{long},1\n")
    assert read_rows(str(tmp_path / "rows.csv"))[0]["prompt"] == long
