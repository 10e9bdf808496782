"""The rows of a loop are counted, and the numbers add up: printed at the start, in summary.json and in the report."""

import json

import pytest

import rl_bridge
from rl_bridge.models.small import TinySource, character_tokenizer
from rl_bridge.run.provenance import UNDIVIDED
from rl_tools.report.page import content
from rl_tools.report.run_files import read_run

TOKENIZER = character_tokenizer("0123456789+=")
MODEL = rl_bridge.Model(TinySource.for_tokenizer(TOKENIZER, hidden=16), TOKENIZER)
PROMPTS = [{"prompt": f"{number % 5}+1=", "answer": str(number % 5 + 1)} for number in range(9)]
LONG = {"prompt": "1+1=", "answer": "2" * 20}
PAIRS = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}, {"prompt": "1+1=", "chosen": "2", "rejected": "3" * 20}]


def counts(rows):
    census = rows.census
    assert census.read == census.trained + census.held_out + sum(census.left_out.values())
    return census.read, census.trained, census.held_out, sum(census.left_out.values())


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_way_to_rows_counts_them(tmp_path):
    file = written(tmp_path / "rows.jsonl", PROMPTS)
    assert counts(rl_bridge.load_rows(file)) == (9, 9, 0, 0)
    assert counts(rl_bridge.load_rows(lambda: iter(PROMPTS))) == counts(rl_bridge.Rows(PROMPTS)) == (9, 9, 0, 0)
    train, held_out = rl_bridge.load_rows(file).hold_out(2)
    assert counts(train) == (9, len(train), 2, 9 - len(train) - 2) and len(held_out) == 2 and len(train) < 7
    imitated = rl_bridge.load_rows([*PROMPTS, LONG], MODEL, rl_bridge.NLL(), max_length=10)
    assert counts(imitated) == (10, 9, 0, 1)
    compared = rl_bridge.load_rows(
        written(tmp_path / "pairs.jsonl", PAIRS), MODEL, rl_bridge.preference_loss(), max_length=10
    )
    assert counts(compared) == (2, 1, 0, 1)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (1, 1, 1)], ids=str)
def test_rows_that_are_held_out_again_add_up(sizes):
    rows = rl_bridge.Rows(PROMPTS)
    for size in sizes:
        rows, held_out = rows.hold_out(size)
        assert len(held_out) == size
    assert counts(rows) == (9, rows.count, sum(sizes), 9 - rows.count - sum(sizes))


@pytest.mark.parametrize("sizes", [(1,), (1, 2)], ids=str)
def test_seeds_share_the_fingerprint_of_the_rows_before_they_were_held_out(sizes):
    """Reports put runs of several seeds together by it, and runs of other rows apart."""
    every, marks = [{"prompt": f"{number}+1="} for number in range(20)], []
    for seed, rows in ((0, every), (1, every), (0, [*every, LONG])):
        train = rl_bridge.Rows(rows, seed=seed)
        assert UNDIVIDED not in train.fingerprints()
        for size in sizes:
            train, _ = train.hold_out(size)
        marks.append(train.fingerprints())
    assert marks[0][UNDIVIDED] == marks[1][UNDIVIDED] != marks[2][UNDIVIDED]
    assert marks[0]["data"] != marks[1]["data"]


def test_a_step_of_more_rows_than_a_filter_leaves_is_refused():
    rows = rl_bridge.load_rows([*PROMPTS, LONG], MODEL, rl_bridge.NLL(), max_length=10)
    assert len(rows.take(9)) == 9
    with pytest.raises(
        ValueError, match=r"takes 10 rows, of .*10 rows: 9 trained on, 1 left out: .*10 tokens \(max_length"
    ):
        rows.take(10)
    assert len(rl_bridge.Rows(PROMPTS).take(20)) == 20  # the next epoch, where nothing was left out


def test_a_run_prints_and_keeps_the_numbers(tmp_path, capsys):
    class Part:
        kind = "numbers"
        parts = settings = fingerprints = lambda self: {}

    rows, _ = rl_bridge.load_rows(written(tmp_path / "rows.jsonl", PROMPTS)).hold_out(2)
    line = rows.census.line()
    assert line == f"{tmp_path / 'rows.jsonl'}: 9 rows of 1 file: {line.partition('file: ')[2]}"
    with rl_bridge.Run("run", state=[rows, Part()], output=tmp_path) as run:
        for _ in run.steps(1):
            rows.take(2)
    assert f"rows: {line}" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["census"] == {"rows 1": vars(rows.census)}
    assert content([read_run(tmp_path / "run")])["runs"][0]["rows"] == [line]
