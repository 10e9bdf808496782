"""Every field of a row x every wrong value, for the four trainers; files and paths of every format."""

import json
from pathlib import Path

from tests.bridge.bad_inputs.case import POLICY, PREFERENCE, REWARD_MODEL, SFT, Case, Damage, changed
from tests.bridge.bad_inputs.inputs import ASKED, PAIRS, SUMS, write_rows

KIND = "data"
USER, SAID = {"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}
CHAT = [{"messages": [{**USER, "content": f"{n}+1="}, {**SAID, "content": str(n + 1)}]} for n in range(12)]
LISTS = [{"prompt": f"{n}+1=", "completions": [str(n + 1), str(n), "7"]} for n in range(12)]
LABELS = [{"prompt": f"{n}+1=", "completion": str(n + 1), "label": n % 2 == 0} for n in range(12)]
ABSENT = object()
TEXT = {"absent": ABSENT, "null": None, "empty": "", "number": 7.5, "true": True, "object": {"a": 1}, "list": [1.5]}
RESPONSE = {key: TEXT[key] for key in ("absent", "null", "empty", "object", "list")} | {
    "NaN": float("nan"),
    "infinite": float("-inf"),
    "no message of the assistant": [USER],
    "a character the tokenizer loses": "3\u20ac",
}
MESSAGES = {
    "null": None,
    "empty": [],
    "text": "1+2=",
    "number": 3,
    "object": USER,
    "a message that is text": ["1+2=", SAID],
    "without a role": [{"content": "1"}, SAID],
    "without a content": [{"role": "user"}, SAID],
    "role null": [{"role": None, "content": "1"}, SAID],
    "role number": [{"role": 3, "content": "1"}, SAID],
    "role empty": [{"role": "", "content": "1"}, SAID],
    "content null": [{"role": "user", "content": None}, SAID],
    "content number": [{"role": "user", "content": 5}, SAID],
    "content object": [{"role": "user", "content": {"text": "1"}}, SAID],
    "nobody answers": [USER],
    "a character the tokenizer loses": [{**USER, "content": "\u20ac"}, SAID],
}
# Trainer's command, its file, its right rows, a field, the wrong values, what else the message has to name.
FIELDS = [
    ("sft", SFT, "sums.jsonl", SUMS, "prompt", TEXT),
    ("sft", SFT, "sums.jsonl", SUMS, "response", RESPONSE),
    ("sft", SFT, "sums.jsonl", SUMS, "tools", {"text": "x", "number": 3, "list": [1], "object": {"a": 1}}),
    ("sft of messages", SFT, "sums.jsonl", CHAT, "messages", MESSAGES),
    ("policy", POLICY, "asked.jsonl", ASKED, "prompt", TEXT),
    ("policy", POLICY, "asked.jsonl", ASKED, "tools", {"text": "x", "number": 3, "list": [1]}),
    (
        "policy",
        changed(POLICY, "--reward exact"),
        "asked.jsonl",
        ASKED,
        "answer",
        {"absent": ABSENT, "null": None, "object": {"a": 1}, "list": [1]},
    ),
    ("preference", PREFERENCE, "pairs.jsonl", PAIRS, "prompt", TEXT),
    ("preference", PREFERENCE, "pairs.jsonl", PAIRS, "chosen", RESPONSE),
    ("preference", PREFERENCE, "pairs.jsonl", PAIRS, "rejected", RESPONSE),
    ("reward-model", REWARD_MODEL, "pairs.jsonl", PAIRS, "prompt", TEXT),
    ("reward-model", REWARD_MODEL, "pairs.jsonl", PAIRS, "chosen", RESPONSE),
    (
        "reward-model",
        f"{REWARD_MODEL} loss:bradley-terry",
        "pairs.jsonl",
        [{**row, "margin": 0.5} for row in PAIRS],
        "margin",
        {"absent": ABSENT, "text": "big", "NaN": float("nan"), "infinite": float("inf"), "list": [1], "true": True},
    ),
    (
        "lists",
        REWARD_MODEL + " loss:plackett-luce",
        "pairs.jsonl",
        LISTS,
        "completions",
        {
            "null": None,
            "one": ["1"],
            "none": [],
            "text": "12",
            "numbers": [1, 2],
            "objects": [{}, {}],
            "equal": ["1", "1"],
        },
    ),
    (
        "labels",
        PREFERENCE + " loss:kto",
        "pairs.jsonl",
        LABELS,
        "label",
        {"absent": ABSENT, "null": None, "text": "good", "number": 2, "NaN": float("nan"), "list": [True]},
    ),
    ("labels", PREFERENCE + " loss:kto", "pairs.jsonl", LABELS, "completion", RESPONSE),
]
WORKS = {("lists", "completions", "equal")}
"""Values that are right after all, with a remark that names the row."""


def with_row(file: str, rows: list, number: int, field: str, value) -> Damage:
    """Row ``number`` (the first is 1) has another value."""

    def damage(folder: Path) -> None:
        made = [dict(row) for row in rows]
        made[number - 1].pop(field, None)
        if value is not ABSENT:
            made[number - 1][field] = value
        write_rows(folder / file, made)

    return damage


def of_fields() -> list[Case]:
    found = []
    for place, (what, command, file, rows, field, values) in enumerate(FIELDS):
        for number, (name, value) in enumerate(values.items()):
            row = 3 + (place + number) % 8
            says = (file, f"row {row}", *(() if "tokenizer" in name else (field,)))
            right = (what, field, name) in WORKS
            found.append(
                Case(
                    kind=KIND,
                    name=f"{what}, {field}: {name}",
                    command=command,
                    says=(file, f"row {row}") if right else says,
                    works=right,
                    damage=with_row(file, rows, row, field, value),
                )
            )
    return found


def text(file: str, content: str | bytes) -> Damage:
    """A file with this content."""
    return lambda folder: (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def together(*damages: Damage) -> Damage:
    def damage(folder: Path) -> None:
        for one in damages:
            one(folder)

    return damage


GOOD = lines(SUMS)
DEEP = "[" * 100_000 + "]" * 100_000
CSV = "prompt,response\n" + "".join(f"{row['prompt']},{row['response']}\n" for row in SUMS)


def parquet(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(SUMS), folder / "rows.parquet")


def parquet_cut(folder: Path) -> None:
    parquet(folder)
    file = folder / "rows.parquet"
    file.write_bytes(file.read_bytes()[:-20])


# Name, file, content, what has to be said. A file that is right after all has nothing.
FILES = [
    ("empty", "rows.jsonl", "", ("rows.jsonl", "no rows")),
    ("blank lines alone", "rows.jsonl", "\n\n \n", ("rows.jsonl", "no rows")),
    ("a line that is cut", "rows.jsonl", GOOD[:-9], ("rows.jsonl", "row 12", "JSON")),
    ("single quotes", "rows.jsonl", GOOD.replace('"', "'"), ("rows.jsonl", "row 1", "JSON")),
    ("a list in a row", "rows.jsonl", GOOD + "[1]\n", ("rows.jsonl", "row 13", "object", "list")),
    ("a number in a row", "rows.jsonl", GOOD + "5\n", ("rows.jsonl", "row 13", "object", "int")),
    ("null in a row", "rows.jsonl", GOOD + "null\n", ("rows.jsonl", "row 13", "object")),
    ("text in a row", "rows.jsonl", GOOD + '"a"\n', ("rows.jsonl", "row 13", "object", "str")),
    ("nested deep", "rows.jsonl", GOOD + DEEP + "\n", ("rows.jsonl", "row 13", "nested")),
    (
        "Latin-1",
        "rows.jsonl",
        GOOD.encode() + '{"prompt": "é", "response": "1"}\n'.encode("latin-1"),
        ("rows.jsonl", "row 13"),
    ),
    ("UTF-16", "rows.jsonl", GOOD.encode("utf-16"), ("rows.jsonl", "row 1")),
    ("zeros", "rows.jsonl", b"\0" * 500, ("rows.jsonl", "row 1")),
    ("a picture", "rows.jsonl", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), ("rows.jsonl", "row 1")),
    ("one long list", "rows.jsonl", json.dumps(SUMS), ("rows.jsonl", "row 1", "list")),
    (
        "two rows in a line",
        "rows.jsonl",
        GOOD + '{"prompt": "1", "response": "2"}{"prompt": "1"}\n',
        ("rows.jsonl", "row 13"),
    ),
    (
        "other keys",
        "rows.jsonl",
        lines([{"question": "1", "reply": "2"}] * 9),
        ("rows.jsonl", "row 1", "question", "prompt"),
    ),
    ("keys with capitals", "rows.jsonl", GOOD.replace("prompt", "Prompt"), ("rows.jsonl", "row 1", "prompt")),
    ("all too few", "rows.jsonl", lines(SUMS[:2]), ("held-out|--held-out", "2 rows|rows")),
    ("one row", "rows.jsonl", lines(SUMS[:1]), ("held-out|--held-out",)),
    ("JSON lines as JSON", "rows.json", GOOD, ("rows.json", "JSON")),
    ("an object as JSON", "rows.json", json.dumps(SUMS[0]), ("rows.json", "list")),
    ("an empty list", "rows.json", "[]", ("rows.json", "no rows")),
    ("empty JSON", "rows.json", "", ("rows.json", "JSON")),
    ("nested JSON", "rows.json", DEEP, ("rows.json", "nested")),
    ("JSON that is cut", "rows.json", json.dumps(SUMS)[:-5], ("rows.json", "JSON")),
    ("a table as JSON", "rows.json", json.dumps({"prompt": ["1"], "response": ["2"]}), ("rows.json", "list")),
    ("empty CSV", "rows.csv", "", ("rows.csv", "no rows")),
    ("CSV without rows", "rows.csv", "prompt,response\n", ("rows.csv", "no rows")),
    ("CSV without a header", "rows.csv", CSV.partition("\n")[2], ("rows.csv", "row 1", "prompt")),
    ("CSV with semicolons", "rows.csv", CSV.replace(",", ";"), ("rows.csv", "row 1", "prompt")),
    ("CSV with a short row", "rows.csv", CSV + "only\n", ("rows.csv", "row 13", "2 columns")),
    ("CSV with a long row", "rows.csv", CSV + "a,b,c\n", ("rows.csv", "row 13", "2 columns")),
    ("CSV with an open quote", "rows.csv", CSV + '"a,b\n', ("rows.csv", "row 13")),
    ("CSV with a column twice", "rows.csv", "prompt,response,response\n1,2,3\n", ("rows.csv", "response", "twice")),
    ("CSV in Latin-1", "rows.csv", CSV.encode() + "é,1\n".encode("latin-1"), ("rows.csv", "row 13")),
    ("no Parquet", "rows.parquet", GOOD, ("rows.parquet", "parquet")),
    ("empty Parquet", "rows.parquet", "", ("rows.parquet", "parquet")),
    ("no Arrow", "rows.arrow", GOOD, ("rows.arrow", "arrow")),
    ("empty Arrow", "rows.arrow", "", ("rows.arrow", "arrow")),
    ("an unknown suffix", "rows.txt", GOOD, ("rows.txt", ".jsonl")),
    ("no suffix", "rows", GOOD, ("rows", ".jsonl")),
    ("a packed file", "rows.jsonl.gz", b"\x1f\x8b" + bytes(99), ("rows.jsonl.gz", ".jsonl")),
    ("a sheet", "rows.xlsx", b"PK\x03\x04" + bytes(99), ("rows.xlsx", ".jsonl")),
    ("right: a byte order mark", "rows.jsonl", b"\xef\xbb\xbf" + GOOD.encode(), None),
    ("right: Windows lines", "rows.jsonl", GOOD.replace("\n", "\r\n"), None),
    ("right: no last newline", "rows.jsonl", GOOD[:-1], None),
    ("right: CSV", "rows.csv", CSV, None),
    ("right: more columns", "rows.jsonl", lines([{**row, "extra": {"a": [1]}} for row in SUMS]), None),
]


def of_files() -> list[Case]:
    return [
        Case(
            kind=KIND,
            name=f"file: {name}",
            command=changed(SFT, f"--data {file}"),
            says=says or (),
            works=says is None,
            damage=text(file, content),
        )
        for name, file, content, says in FILES
    ]


def folder_of(**files: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / "many").mkdir()
        for name, content in files.items():
            (folder / "many" / name.replace("_", ".")).write_text(content)

    return damage


def saved(folder: Path) -> None:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(SUMS)}).save_to_disk(str(folder / "many"))


def saved_without_table(folder: Path) -> None:
    saved(folder)
    next((folder / "many" / "train").glob("*.arrow")).unlink()


def saved_broken(folder: Path) -> None:
    saved(folder)
    (folder / "many" / "train" / "dataset_info.json").write_text("{")


LOOP = lambda folder: (folder / "rows.jsonl").symlink_to("rows.jsonl")  # noqa: E731
# Name, the words of --data, damage, what has to be said.
PATHS = [
    ("absent file", "gone.jsonl", None, ("gone.jsonl", "no such file")),
    ("absent folder", "gone/rows.jsonl", None, ("gone/rows.jsonl", "no such file")),
    ("a folder with the name of a file", "rows.jsonl", lambda f: (f / "rows.jsonl").mkdir(), ("rows.jsonl", "no file")),
    ("an empty folder", "many", folder_of(), ("many", "no file", ".jsonl")),
    ("a folder without data", "many", folder_of(read_md="x"), ("many", "no file", ".jsonl")),
    ("a folder with a bad file", "many", folder_of(a_jsonl=GOOD, b_jsonl="{"), ("many/b.jsonl", "row 1", "JSON")),
    ("a split that no file has", "many@test", folder_of(train_jsonl=GOOD), ("many", "test")),
    ("a split of a file", "sums.jsonl@test", None, ("sums.jsonl", "test", "train")),
    ("a part that is none", "sums.jsonl@train[a:b]", None, ("sums.jsonl", "train[a:b]")),
    ("a part with nothing", "sums.jsonl@train[50:60]", None, ("sums.jsonl", "no rows")),
    ("a part backwards", "sums.jsonl@train[9:3]", None, ("sums.jsonl", "no rows")),
    ("a saved dataset without the split", "many@dev", saved, ("many", "dev", "train")),
    ("a saved dataset without its table", "many", saved_without_table, ("many",)),
    ("a saved dataset with broken JSON", "many", saved_broken, ("many",)),
    ("a name that no hub has", "nobody/nothing", None, ("nobody/nothing", ".jsonl")),
    ("a name that cannot be one", "a/b/c/d", None, ("a/b/c/d", ".jsonl")),
    ("the model's folder", "tinyq", None, ("tinyq",)),
    (
        "a link to nowhere",
        "rows.jsonl",
        lambda f: (f / "rows.jsonl").symlink_to("gone"),
        ("rows.jsonl", "no such file"),
    ),
    ("a link to itself", "rows.jsonl", LOOP, ("rows.jsonl",)),
    ("empty", "''", None, ("data|--data",)),
    ("a pipe", "/dev/stdin", None, ("/dev/stdin",)),
    ("right: a part", "sums.jsonl@train[2:9]", None, None),
    ("right: a folder", "many", folder_of(a_jsonl=GOOD, b_csv=CSV), None),
    ("right: a saved dataset", "many", saved, None),
]


def of_paths() -> list[Case]:
    return [
        Case(
            kind=KIND,
            name=f"path: {name}",
            command=changed(SFT, f"--data {data}"),
            says=s or (),
            works=s is None,
            damage=d,
        )
        for name, data, d, s in PATHS
    ]


def pairs(change) -> Damage:
    return lambda folder: write_rows(folder / "pairs.jsonl", change([dict(row) for row in PAIRS]))


def questions(change) -> Damage:
    return lambda folder: write_rows(folder / "asked.jsonl", change([dict(row) for row in ASKED]))


def sums(change) -> Damage:
    return lambda folder: write_rows(folder / "sums.jsonl", change([dict(row) for row in SUMS]))


LONG = "1" * 2000
# Name, command, damage, what has to be said, and whether that is a warning of a run that works.
SETS = [
    ("all pairs equal", PREFERENCE, pairs(lambda r: [{**x, "rejected": x["chosen"]} for x in r]), ("pairs.jsonl", "same"), False),
    ("some pairs equal", PREFERENCE, pairs(lambda r: [*r, {**r[0], "rejected": r[0]["chosen"]}]), ("1 of 13", "pairs.jsonl"), True),
    ("all labels true", PREFERENCE + " loss:kto", pairs(lambda r: [{**x, "label": True} for x in LABELS]), ("pairs.jsonl", "true"), True),
    ("labels for pairs", PREFERENCE, pairs(lambda r: LABELS), ("pairs.jsonl", "row 1|row", "chosen"), False),
    ("lists for pairs", REWARD_MODEL, pairs(lambda r: LISTS), ("pairs.jsonl", "chosen"), False),
    ("sums for pairs", changed(PREFERENCE, "--data sums.jsonl"), None, ("sums.jsonl", "row 1", "chosen"), False),
    ("pairs for sums", changed(SFT, "--data pairs.jsonl"), None, ("pairs.jsonl", "row 1", "response"), False),
    ("both forms", PREFERENCE, pairs(lambda r: [{**x, "label": True, "completion": "1"} for x in r]), ("pairs.jsonl", "row 1", "label"), False),
    ("prompt and messages", PREFERENCE, pairs(lambda r: [*r, {**r[0], "messages": [USER]}]), ("pairs.jsonl", "row 13", "messages"), False),
    ("conversations that differ at once", PREFERENCE, pairs(lambda r: [*r, {"chosen": [SAID], "rejected": [USER]}]), ("pairs.jsonl", "row 13"), False),
    ("too long a prompt", POLICY, questions(lambda r: [*r, {"prompt": LONG, "answer": "1"}]), ("asked.jsonl", "row 13", "512"), False),
    ("too long a response", SFT, sums(lambda r: [*r, {"prompt": "1", "response": LONG}]), ("sums.jsonl", "row 13", "512"), False),
    ("too long a pair", PREFERENCE, pairs(lambda r: [*r, {**r[0], "chosen": LONG}]), ("pairs.jsonl", "row 13", "512"), False),
    ("all longer than max-length", changed(SFT, "--max-length 2"), None, ("max-length", "2"), False),
    ("no token id", POLICY, questions(lambda r: [*r, {"prompt": [5, 99999], "answer": "1"}]), ("asked.jsonl", "row 13", "99999"), False),
    ("a negative token id", POLICY, questions(lambda r: [*r, {"prompt": [5, -1], "answer": "1"}]), ("asked.jsonl", "row 13", "-1"), False),
    ("nothing to sample", POLICY, questions(lambda r: [*r, {"prompt": [USER, SAID], "answer": "1"}]), ("asked.jsonl", "row 13", "assistant"), False),
    ("a prompt that contradicts", SFT, sums(lambda r: [*r, {**r[0], "messages": [USER, SAID]}]), ("sums.jsonl", "row 13", "messages"), False),
    ("a control token in a prompt", SFT, sums(lambda r: [*r, {"prompt": [{**USER, "content": "<eos>1"}], "response": "2"}]), ("sums.jsonl", "<eos>"), True),
    ("held-out rows that are the data", changed(SFT, "--held-out -", "--eval-data sums.jsonl"), None, ("12 of 12", "--eval-data", "--data"), True),
    ("absent held-out rows", changed(SFT, "--held-out -", "--eval-data gone.jsonl"), None, ("gone.jsonl", "no such file"), False),
    ("empty held-out rows", changed(SFT, "--held-out -", "--eval-data rows.jsonl"), text("rows.jsonl", ""), ("rows.jsonl", "no rows"), False),
    ("bad held-out rows", changed(SFT, "--held-out -", "--eval-data rows.jsonl"), text("rows.jsonl", GOOD + "{}\n"), ("rows.jsonl", "row 13"), False),
    ("held-out beside eval-data", changed(SFT, "--eval-data sums.jsonl"), None, ("held-out", "eval-data"), False),
    ("more held out than rows", changed(SFT, "--held-out 12"), None, ("held-out", "12"), False),
    ("far more held out than rows", changed(SFT, "--held-out 9999"), None, ("held-out", "9999"), False),
    ("one prompt alone", SFT, sums(lambda r: [{**x, "prompt": "1"} for x in r]), ("held-out|prompt",), False),
    ("answers that are lists", changed(POLICY, "--reward exact"), questions(lambda r: [{**x, "answer": [1]} for x in r]), ("asked.jsonl", "answer"), False),
    ("no answers for exact", changed(POLICY, "--reward exact"), questions(lambda r: [{"prompt": x["prompt"]} for x in r]), ("answer",), False),
    ("no answers for a first sft", changed(POLICY, "--sft.steps 1"), questions(lambda r: [{"prompt": x["prompt"]} for x in r]), ("asked.jsonl", "answer"), False),
]  # fmt: skip


def cases() -> list[Case]:
    sets = [Case(kind=KIND, name=f"rows: {n}", command=c, damage=d, says=s, works=w) for n, c, d, s, w in SETS]
    return [*of_fields(), *of_files(), *of_paths(), *sets]
