"""Rows asked are rows trained: the rows that are read = trained on + held out + left out, in every command."""

import json
import re
from dataclasses import replace

import pytest

from rl_bridge.data.census import Census, SourceCensus
from rl_bridge.data.rows import RowStream
from rl_bridge.run.run import DryRun
from rl_tools.report.page import content
from rl_tools.report.run_files import read_run
from rl_train.compared import loss_options
from rl_train.policy import run_policy
from rl_train.policy_configs import quickstart
from rl_train.policy_options import WarmStart
from rl_train.preference import PreferencePipeline, run_preference
from rl_train.reward_model import RewardModelPipeline, run_reward_model
from rl_train.sft import SFTPipeline, run_sft

LONG, LIMIT = "1" * 40, 20
STEP = 2


def of_answers(prompt, right, wrong):
    return [{"prompt": prompt, "answer": right}]


def of_pairs(prompt, right, wrong):
    return [{"prompt": prompt, "chosen": right, "rejected": wrong}]


def of_singles(prompt, right, wrong):
    return [{"prompt": prompt, "completion": right, "label": True}]


def of_lists(prompt, right, wrong):
    return [{"prompt": prompt, "completions": [right, wrong]}]


def of_both_labels(prompt, right, wrong):
    completions = [(right, True), (wrong, False)]
    return [{"prompt": prompt, "completion": text, "label": label} for text, label in completions]


def mixed(prompt, right, wrong):
    """A pair and a single completion, of which the loss makes three examples."""
    return [*of_pairs(prompt, right, wrong), {"prompt": prompt, "completion": wrong, "label": False}]


def sft(**options):
    return run_sft, SFTPipeline(steps=1, rows_per_step=STEP, **options)


def preference(loss):
    def pipeline(**options):
        return run_preference, PreferencePipeline(steps=1, rows_per_step=STEP, loss=loss_options(loss), **options)

    return pipeline


def reward_model(loss):
    def pipeline(**options):
        return run_reward_model, RewardModelPipeline(steps=1, rows_per_step=STEP, loss=loss_options(loss), **options)

    return pipeline


def policy(warm):
    def pipeline(**options):
        quick, start = quickstart(), WarmStart(steps=warm, rows_per_step=STEP)
        few = {"steps": 1, "prompts_per_step": STEP, "sampling": replace(quick.policy.sampling, n=2)}
        few |= {"updates_per_step": 1}
        return run_policy, replace(quick, policy=replace(quick.policy, **few), sft=start, track_kl=False, **options)

    return pipeline


COMMANDS = {
    "sft": (sft, of_answers),
    "dpo": (preference("dpo"), of_pairs),
    "kto of pairs": (preference("kto"), of_pairs),
    "kto of singles": (preference("kto"), of_singles),
    "kto of both": (preference("kto"), mixed),
    "aot of singles": (preference("aot_unpaired"), of_both_labels),
    "reward model": (reward_model("bradley_terry"), of_pairs),
    "ranking": (reward_model("plackett_luce"), of_lists),
    "policy": (policy(0), of_answers),
    "warm policy": (policy(1), of_answers),
}
WITHOUT_LIMIT = ("policy", "warm policy")
"""Commands without --max-length."""


def rows_of(form, prompts, *, twice=0, long=0):
    rows = [row for number in range(prompts) for row in form(f"{number}+1=", str(number + 1), "7")]
    rows += [row for number in range(twice) for row in form(f"{number}+1=", f"{number + 1}0", "7")]
    return rows + [row for number in range(long) for row in form(f"{number}-{number}=", LONG + "2", LONG)]


def written(file, rows):
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def settled(run, pipeline, monkeypatch):
    """The census of a run that ends before its first step."""
    counted = []
    settle = Census.settle
    with monkeypatch.context() as patch:
        patch.setattr(Census, "settle", lambda census, **options: (counted.append(census), settle(census, **options)))
        with pytest.raises(DryRun):
            run(replace(pipeline, dry_run=True))
    (census,) = counted
    return census


def in_words(text):
    """The numbers of the line that is printed: (rows, files, their places)."""
    (line,) = re.findall(r"^rows: (.*)$", text, re.MULTILINE)
    for part in line.split("; "):
        read, files, places = re.search(r": (\d+) rows(?: of (\d+) files?)?: (.*)", part).groups()
        yield int(read), files and int(files), [int(number) for number in re.findall(r"(?:^|, )(\d+) ", places)]


CELLS = {
    "held out of the rows, both causes": ({"twice": 8, "long": 3}, False),
    "--eval-data, rows that are too long": ({"long": 3}, True),
}
FEWER = {
    "held out of the rows, no cause": ({}, False),
    "held out of the rows, the same prompts": ({"twice": 8}, False),
    "held out of the rows, too long": ({"long": 3}, False),
    "--eval-data, no cause": ({}, True),
}
"""Cells that differ from the others by the data alone: one command has them."""
CASES = [*((command, cell) for command in COMMANDS for cell in CELLS), *(("sft", cell) for cell in FEWER)]


@pytest.mark.parametrize(("command", "cell"), CASES, ids=str)
def test_rows_read_are_trained_on_held_out_or_left_out(command, cell, tmp_path, monkeypatch, capsys, model_folder):
    make, form = COMMANDS[command]
    causes, apart = (CELLS | FEWER)[cell]
    limited = command not in WITHOUT_LIMIT
    rows = rows_of(form, 12, **causes)
    options = {"model": str(model_folder), "held_out": 6}
    written(tmp_path / "rows" / "a.jsonl", rows[:5])
    written(tmp_path / "rows" / "b.jsonl", rows[5:])
    written(tmp_path / "rows" / "empty.jsonl", [])
    if apart:
        held = rows_of(form, 3, long=causes.get("long", 0))
        del options["held_out"]
        options["eval_data"] = written(tmp_path / "held.jsonl", held)
    if limited:
        options["max_length"] = LIMIT
    run, pipeline = make(data=str(tmp_path / "rows"), threads=1, **options)
    census = settled(run, pipeline, monkeypatch)
    sources = [census.data, *([census.eval_data] if apart else [])]
    expected = [rows, held] if apart else [rows]
    for source, part, (read, files, places) in zip(sources, expected, in_words(capsys.readouterr().out), strict=True):
        assert source.read == read == len(part)
        assert source.read == source.trained + source.held_out + sum(source.left_out.values()) == sum(places)
        assert source.files == files == (3 if part is rows else 1)
        long = sum(LONG in json.dumps(row) for row in part)
        count = sum(count for cause, count in source.left_out.items() if "--max-length" in cause)
        of_long_prompts = sum(count for cause, count in source.left_out.items() if "--held-out" in cause)
        if limited:
            assert long - of_long_prompts <= count <= long
        else:
            assert count == 0
    assert census.data.trained > 0 and (census.of_held_out.held_out > 0)
    assert (census.data.held_out == 0) == apart
    if "twice" in causes and not apart:
        assert any("--held-out" in cause for cause in census.data.left_out)


@pytest.mark.parametrize("command", ["sft", "kto of both", "reward model", "policy"])
def test_the_numbers_are_those_of_the_stream_in_the_summary_and_in_the_report(
    command, tmp_path, monkeypatch, model_folder
):
    make, form = COMMANDS[command]
    streams, take = {}, RowStream.take
    monkeypatch.setattr(
        RowStream, "take", lambda stream, count: (streams.update({id(stream): stream._rows}), take(stream, count))[1]
    )
    data = written(tmp_path / "rows.jsonl", rows_of(form, 12, twice=8, long=2))
    limit = {} if command in WITHOUT_LIMIT else {"max_length": LIMIT}
    output = {"output": tmp_path / "runs", "name": "run", "checkpoint_every": 9}
    run, pipeline = make(data=data, model=str(model_folder), held_out=4, threads=1, **limit, **output)
    summary = run(pipeline)
    (rows,) = streams.values()
    census = summary["census"]["data"]
    # A pair is two examples of KTO, and a single completion one.
    examples = {"kto of both": 3 / 2}.get(command, 1)
    if command == "kto of both":
        assert census["trained"] < len(rows) <= 2 * census["trained"]
    else:
        assert census["trained"] == len(rows) * examples
    assert summary["rows"] == census["trained"] and summary["held_out"] == census["held_out"]
    assert summary["left_out"] == sum(census["left_out"].values()) > 0
    assert census["read"] == summary["rows"] + summary["held_out"] + summary["left_out"]
    folder = tmp_path / "runs" / "run"
    assert json.loads((folder / "summary.json").read_text())["census"] == summary["census"]
    (about,) = content([read_run(folder)])["runs"]
    (line,) = about["rows"]
    assert line == SourceCensus(**census).line() and f"{census['read']} rows of 1 file: {census['trained']} t" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_too_few_rows_for_a_step_end_the_run_by_name(command, tmp_path, model_folder):
    make, form = COMMANDS[command]
    if command in WITHOUT_LIMIT:
        rows, options = rows_of(form, 5, twice=4), {"held_out": 4}
        match = "their prompts are those of held-out rows"
    else:
        rows = rows_of(form, 2 if "kto" in command else 1, long=30)
        options = {"eval_data": written(tmp_path / "held.jsonl", rows_of(form, 4)), "max_length": LIMIT}
        match = "more than 20 tokens .--max-length"
    data = written(tmp_path / "rows.jsonl", rows)
    run, pipeline = make(data=data, model=str(model_folder), threads=1, dry_run=True, **options)
    parts = [(name, option) for name, option in PER_STEP if hasattr(pipeline, name)]
    steps = {name: replace(getattr(pipeline, name), **{option: 9}) for name, option in parts} or {"rows_per_step": 9}
    left = rf"rows\.jsonl: of {len(rows)} rows \d are left to train on( as \d examples)?, and one step takes 9 "
    with pytest.raises(ValueError, match=rf"{left}.*{match}"):
        run(replace(pipeline, **steps))


PER_STEP = [("sft", "rows_per_step"), ("policy", "prompts_per_step")]


def test_few_rows_of_which_none_is_left_out_are_trained_on_again(tmp_path, monkeypatch, model_folder):
    run, pipeline = sft(data=written(tmp_path / "rows.jsonl", rows_of(of_answers, 4)), model=str(model_folder))
    few = replace(pipeline, held_out=2, rows_per_step=8)
    assert settled(run, few, monkeypatch).summary()["rows"] == 2
