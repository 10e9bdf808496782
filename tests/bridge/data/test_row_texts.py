"""Each text that a reader accepts every writer of a run can write; half of a character is refused at reading."""

import json
import os
import re
from types import SimpleNamespace

import datasets
import pytest
import torch

from rl_bridge.algorithms.completion_log import CompletionLog
from rl_bridge.algorithms.evaluation import _row_of, write_samples
from rl_bridge.common.files import write_json
from rl_bridge.common.step_folders import write_json as write_json_of_checkpoints
from rl_bridge.data.comparisons import comparison_of
from rl_bridge.data.rows import policy_row, read_rows, supervised_row
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import single_turn
from rl_bridge.run.provenance import of_rows
from rl_bridge.run.recorder import Recorder
from rl_tools.report.page import content, page
from rl_tools.report.run_files import read_run
from rl_tools.tune.journal import Journal, read_journal
from rl_train.sft import SFTPipeline

HALF, OTHER_HALF = "\ud83d", "\ude00"
USER, SAID = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}


def called(arguments):
    return [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


PLACES = {
    "prompt": {"prompt": f"cut {HALF}"},
    "messages[0].content": {"messages": [{**USER, "content": HALF}, SAID]},
    "messages[1].content": {"messages": [USER, {**SAID, "content": f"{OTHER_HALF}{HALF} in the wrong order"}]},
    "messages[0].content[1].text": {"messages": [{**USER, "content": [{"text": "a"}, {"text": HALF}]}, SAID]},
    "messages[0].role": {"messages": [{**USER, "role": f"user{HALF}"}, SAID]},
    "messages[1].tool_calls[0].function.arguments.city": {"messages": called({"city": HALF})},
    "tools[0].description": {"messages": [USER, SAID], "tools": [{"description": HALF}]},
    "answer": {"prompt": "a", "answer": HALF},
    "meta.deep[1][0].x": {"prompt": "a", "answer": "b", "meta": {"deep": [1, [{"x": f"é{HALF}"}]]}},
    "meta, a name": {"prompt": "a", "answer": "b", "meta": {HALF: 1}},
    "the row, a name": {"prompt": "a", "answer": "b", f"note{HALF}": 1},
    "chosen[0].content": {"prompt": "a", "chosen": [{**SAID, "content": HALF}], "rejected": "b"},
    "completions[1]": {"prompt": "a", "completions": ["b", HALF]},
}
WITHIN_JSON = {
    "messages[1].tool_calls[0].function.arguments.city[0]": {"messages": called(json.dumps({"city": [HALF]}))},
    "tools[0].name": {"messages": [USER, SAID], "tools": json.dumps([{"name": HALF}])},
    "chat_template_kwargs.day": {"messages": [USER, SAID], "chat_template_kwargs": json.dumps({"day": HALF})},
    "messages[0].name": {"messages": json.dumps([{**USER, "name": HALF}, SAID])},
}
"""Columns that may be JSON text, in which the half is an escape."""
CHECKS = {"policy": policy_row, "supervised": supervised_row, "pairs": lambda row: {"comparison": comparison_of(row)}}
WHOLE = {"prompt": "a", "answer": "b", "chosen": "a", "rejected": "b"}


def in_file(tmp_path, rows, form):
    path = tmp_path / f"rows.{form}"
    text = [json.dumps(row) for row in rows]
    path.write_text("\n".join(text) if form == "jsonl" else f"[{','.join(text)}]")
    return str(path)


SOURCES = {
    "jsonl": lambda path, rows: in_file(path, rows, "jsonl"),
    "json": lambda path, rows: in_file(path, rows, "json"),
    "in hand": lambda path, rows: rows,
    "a function": lambda path, rows: lambda: iter(rows),
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("place", PLACES)
def test_half_of_a_character_is_refused_by_row_place_and_code_point(place, source, check, tmp_path):
    rows = [{**WHOLE, "note": "😀"}, PLACES[place]]
    with pytest.raises(ValueError) as refused:
        read_rows(SOURCES[source](tmp_path, rows), fields=(), check=CHECKS[check])
    message = str(refused.value)
    assert f"row 2: {place}: half of a surrogate pair (U+D83D)" in message.replace("U+DE00", "U+D83D")
    message.encode()


@pytest.mark.parametrize("place", WITHIN_JSON)
def test_half_of_a_character_within_json_text_is_refused_by_its_place(place):
    with pytest.raises(ValueError, match=rf"row 1: {re.escape(place)}: half of a surrogate pair \(U\+D83D\)"):
        read_rows([WITHIN_JSON[place]], fields=(), check=supervised_row)


def test_a_cell_of_csv_may_hold_half_of_a_character_as_json(tmp_path):
    (tmp_path / "rows.csv").write_text(
        'messages\n"' + json.dumps([{**USER, "content": HALF}]).replace('"', '""') + '"\n'
    )
    with pytest.raises(ValueError, match=r"rows\.csv, row 1: messages\[0\]\.content: half of a surrogate"):
        read_rows(str(tmp_path / "rows.csv"), fields=())


@pytest.mark.parametrize("option", ["data", "eval_data", "model"])
def test_a_name_that_no_file_of_a_run_can_hold_is_refused_with_the_options(option):
    with pytest.raises(ValueError, match=rf"{option}: half of a surrogate pair \(U\+DCFF\)"):
        SFTPipeline(**{option: os.fsdecode(b"rows-\xff.jsonl")})


def test_whole_characters_of_two_halves_are_read(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "\\ud83d\\ude00"}\n')
    assert read_rows(str(tmp_path / "rows.jsonl"))[0]["prompt"] == "😀"


TEXTS = {
    "emoji": "😀 é 漢",
    "NUL and other controls": "a\0b\x01\x1b[2J\x7f\x85",
    "right to left": "\u202eabc\u2066\u200f עברית",
    "ends of lines": "a\r\nb\rc\nd\u2028e\u2029f\x0b\x0c",
    "no characters": "\ufffe\uffff\U0010ffff\ufeff",
    "markup": '</script><!-- & "\\u003c \\',
    "combined": "e\u0301" * 40,
    "10 MB": "0123456789" * 2**20,
    "surrogates of no reader": f"an engine or a file's name {HALF}",
}


def of_samples(folder, text):
    trajectory = SimpleNamespace(
        row={"prompt": text, "answer": text}, completion=text, rewards={"right": 1.0}, finish_reason="stop"
    )
    write_samples(folder, before={"greedy": {"samples": [_row_of(trajectory)]}})
    (sample,) = json.loads((folder / "samples.json").read_text("utf-8"))["before"]["greedy"]
    return [sample["prompt"], sample["answer"], sample["completion"]]


def of_completions(folder, text):
    log = CompletionLog(folder, lambda tokens: text, every=1, kept=1)
    trajectory = single_turn([3], [4])
    chosen = log.choose(0, torch.tensor([True]))
    sampled = SimpleNamespace(trajectories=[trajectory], rewards=torch.tensor([1.0]))
    log.write(0, sampled, collate([trajectory], 0), chosen, {})
    (line,) = (folder / "completions.jsonl").read_bytes().splitlines()
    (sample,) = json.loads(line)["samples"]
    return [sample["prompt"], sample["completion"], *sample["tokens"]["text"]]


def of_the_record(folder, text):
    recorder = Recorder(folder)
    recorder.note({"step": 0, "note": text})
    recorder.close()
    return [json.loads(line)["note"] for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def of_the_summary(folder, text):
    recorder = Recorder(folder)
    recorder.finish({"result": text})
    recorder.close()
    return [json.loads((folder / "summary.json").read_text("utf-8"))["result"]]


def of_a_checkpoint(folder, text):
    write_json_of_checkpoints(folder / "state.json", {"cached_results": [text]})
    return json.loads((folder / "state.json").read_text("utf-8"))["cached_results"]


def of_the_report(folder, text):
    write_json(folder / "config.json", {"data": text})
    lines = [{"step": 0, "note": text}, {"stage": "sft", "step": 0, "seconds": 1.0, "nll": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = {"prompt": text, "completion": text, "answer": text}
    write_samples(folder, before={"greedy": {"samples": [row]}})
    html = page(content([read_run(folder)])).encode().decode("utf-8")
    start = html.index('type="application/json"')
    begin = html.index(">", start) + 1
    found = json.loads(html[begin : html.index("</script", begin)])
    sample = found["samples"][0]["greedy"][0]
    return [sample["prompt"], sample["answer"], sample["before"]["completion"], found["options"][0]["data"]]


def of_the_journal(folder, text):
    pytest.importorskip("optuna")
    Journal(folder / "journal.jsonl").append({"kind": "told", "text": text})
    return [event["text"] for event in read_journal(folder / "journal.jsonl")[0]]


WRITERS = {
    "samples.json": of_samples,
    "completions.jsonl": of_completions,
    "metrics.jsonl": of_the_record,
    "summary.json": of_the_summary,
    "checkpoint": of_a_checkpoint,
    "report": of_the_report,
    "journal": of_the_journal,
}


SEVERAL_TIMES = ("completions.jsonl", "metrics.jsonl", "report", "journal")
"""Files that hold the text several times, or whose text is searched for secrets: they get 1 MB of the 10."""


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", TEXTS)
def test_every_file_of_a_run_gives_a_text_back(name, writer, tmp_path):
    text = TEXTS[name][: 2**20 if writer in SEVERAL_TIMES else None]
    if HALF not in text:
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": text, "answer": text}) + "\n")
        (row,) = read_rows(str(tmp_path / "rows.jsonl"))
        assert row["prompt"] == row["answer"] == text and len(of_rows([row])) == 16
    assert set(WRITERS[writer](tmp_path, text)) == {text}


@pytest.mark.parametrize("name", [name for name in TEXTS if "surrogates" not in name])
def test_every_reader_gives_a_text_back(name, tmp_path):
    rows = [{"prompt": TEXTS[name], "answer": "b"}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    cell = TEXTS[name].replace('"', '""')
    (tmp_path / "rows.csv").write_text(f'prompt,answer\r\n"{cell}",b\r\n', "utf-8", newline="")
    sources = [str(tmp_path / file) for file in ("rows.parquet", "saved", "rows.csv")]
    for source in (*sources, in_file(tmp_path, rows, "json"), in_file(tmp_path, rows, "jsonl"), rows):
        assert [row["prompt"] for row in read_rows(source)] == [TEXTS[name]], source
