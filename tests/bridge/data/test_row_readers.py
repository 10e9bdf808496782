"""A reader of the user's own gives rows as a file does: the same checks, the same rows, errors with its name."""

import functools
import itertools
import json

import pytest

from rl_bridge.data import row_readers
from rl_bridge.data.comparisons import read_comparisons
from rl_bridge.data.row_readers import reader_fingerprint, rows_of
from rl_bridge.data.rows import read_rows, supervised_row

ROWS = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(5)]
FILE = """
from beside import ROWS

def plain():
    yield from ROWS

def of_split(split):
    return ROWS if split == "train" else ROWS[:2]

def with_default(split="test"):
    return [{**row, "split": split} for row in ROWS]

def breaks():
    yield ROWS[0]
    yield ROWS[1]
    raise KeyError("answer")

def leaves():
    raise SystemExit(3)

def nothing():
    for row in ROWS:
        row["prompt"]

def text():
    return "1+1="

def pairs(split):
    yield {"prompt": "1+1=", "chosen": "2", "rejected": "3"}

number = 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "beside.py").write_text(f"ROWS = {ROWS!r}\n")
    (tmp_path / "reader.py").write_text(FILE)
    return tmp_path / "reader.py"


def without_place(rows):
    return [{name: value for name, value in row.items() if name != "_where"} for row in rows]


def numbered(split="train"):
    """A reader that gives one dict again and again, changed."""
    row = {}
    for place in ROWS if split == "train" else ROWS[:1]:
        row.update(place)
        yield row


class Reader:
    """An object that is called."""

    def __call__(self):
        return iter(ROWS)


def test_every_form_of_a_reader_gives_the_rows_of_the_file(tmp_path, file):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    for source in (
        *(f"{file}:plain", f"{file}:of_split", f"{file}:of_split@train"),
        *(numbered, functools.partial(numbered, "train"), lambda: ROWS, Reader(), ROWS, iter(ROWS), tuple(ROWS)),
    ):
        assert without_place(read_rows(source)) == without_place(read_rows(str(tmp_path / "rows.jsonl"))) == ROWS


def test_a_split_is_the_function_s_argument(file):
    assert without_place(read_rows(f"{file}:of_split@test")) == ROWS[:2]
    assert [read_rows(f"{file}:with_default{split}")[0]["split"] for split in ("", "@dev")] == ["test", "dev"]
    with pytest.raises(TypeError, match=r"reader\.py:plain@test takes no argument, so that there is no split 'test'"):
        read_rows(f"{file}:plain@test")


def test_a_row_has_its_reader_and_number(file):
    assert read_rows(f"{file}:plain")[2]["_where"] == f"{file}:plain, row 3"
    assert [read_rows(source)[1]["_where"] for source in (numbered, ROWS)] == ["numbered, row 2", "the rows, row 2"]


def two(first, second):
    return ROWS


def refused(row):
    return [*ROWS[:2], row]


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("breaks", ValueError, r"reader\.py:breaks: row 3 cannot be read: KeyError: 'answer'"),
        ("leaves", ValueError, r"reader\.py:leaves: row 1 cannot be read: SystemExit: 3"),
        ("nothing", TypeError, r"reader\.py:nothing gives NoneType: a reader yields or returns rows, each a dict"),
        ("text", TypeError, r"reader\.py:text gives str: a reader yields"),
        ("absent", ValueError, r"reader\.py has no function 'absent' that reads rows"),
        ("number", ValueError, r"reader\.py has no function 'number' that reads rows"),
        (two, TypeError, "two needs first, second: a reader takes no argument, or the name of a split"),
        (lambda: ROWS[0], TypeError, "gives dict: a reader yields"),
        (lambda: refused(["1+1="]), ValueError, r"<lambda>, row 3: expected an object with fields prompt, got list"),
        (refused({"answer": 1}), ValueError, "the rows, row 3: field 'prompt' is missing"),
        (3, TypeError, "the rows gives int"),
        ([], ValueError, "the rows has no rows"),
    ],
)
def test_what_is_no_reader_and_what_is_no_row_is_named(file, source, error, words):
    with pytest.raises(error, match=words):
        read_rows(f"{file}:{source}" if isinstance(source, str) else source)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such data file: .*absent\.py"):
        read_rows(f"{tmp_path / 'absent.py'}:rows")


def test_rows_to_imitate_and_comparisons_come_from_a_reader_too(file):
    assert len(read_rows(f"{file}:plain", fields=(), check=supervised_row)) == len(ROWS)
    (comparison,) = read_comparisons(f"{file}:pairs")
    assert comparison.completions == ("2", "3") and comparison.where == f"{file}:pairs, row 1"


def test_another_reader_has_another_fingerprint(file):
    source = f"{file}:plain"
    before = reader_fingerprint(source)
    assert before.keys() == {"data reader"} and reader_fingerprint(f"{file}:of_split") != before
    (file.parent / "beside.py").write_text(f"ROWS = {ROWS[:3]!r}\n")
    assert reader_fingerprint(source) != before
    assert reader_fingerprint(numbered) == reader_fingerprint(numbered) != reader_fingerprint(two)
    assert reader_fingerprint(Reader())["data reader"].startswith("Reader:")
    assert reader_fingerprint(ROWS) == reader_fingerprint("rows.jsonl") == reader_fingerprint(None) == {}


def test_a_reader_that_gives_rows_for_long_says_so(capsys):
    """An endless one filled the memory without a word."""
    read = rows_of(lambda: ({"prompt": "1"} for _ in range(10**6)))
    for _ in range(10**5 + 9):
        place, _ = next(read)
    output = capsys.readouterr().out
    assert place.endswith("row 100009") and "100,000 rows so far; they are all read" in output
    assert output.count("rows so far") == 1


LONG = 3000  # what never ends would hold a test that fails


class Endless:
    def __iter__(self):
        return itertools.repeat({"prompt": "1", "answer": "1"}, LONG)


def generates():
    for _ in range(LONG):
        yield {"prompt": "1", "answer": "1"}


@pytest.mark.parametrize(
    "source",
    [
        generates,
        generates(),
        lambda: itertools.islice(itertools.cycle([{"prompt": "1", "answer": "1"}]), LONG),
        Endless(),
        Endless,
    ],
    ids=["a generator's function", "a generator", "a cycle", "an iterable", "a class of iterables"],
)
def test_a_reader_that_never_ends_is_refused(source, monkeypatch):
    """A function that makes problems for ever, as for a stream, filled the memory; rows with a length are all read."""
    monkeypatch.setattr(row_readers, "MOST", 500)
    with pytest.raises(TypeError, match=r"has given 500 rows and goes on: .* cut, as by itertools.islice"):
        read_rows(source)
    assert len(read_rows([{"prompt": "1", "answer": "1"}] * 501)) == 501
    assert len(read_rows(lambda: itertools.repeat({"prompt": "1", "answer": "1"}, 500))) == 500
