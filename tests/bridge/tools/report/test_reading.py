"""A run's folder is read while it is written to; what is damaged is named by its file and line."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from rl_bridge.algorithms.policy_setup import PolicyEngines, Replaced
from rl_tools.cli import main
from rl_tools.report.page import content, encoded
from rl_tools.report.run_files import FILES, read_run
from rl_tools.report.sections import slowest_steps, warnings_of
from tests.bridge.tools.report.runs import memory_lines, record, sample, write_lines, write_run


def test_what_is_being_written_is_left_out(tmp_path):
    folder = write_run(tmp_path / "a", steps=3, finished=False)
    for name in ("metrics.jsonl", "completions.jsonl"):
        with (folder / name).open("a") as stream:
            stream.write('{"stage": "policy", "step": 3, "rew')
    run = read_run(folder)
    assert [found["step"] for found in run.records] == [0, 1, 2] and not run.finished
    assert [line["step"] for line in run.completions] == [0] and run.samples["after"]


def break_line(folder, name, number, text):
    lines = (folder / name).read_text("utf-8").splitlines()
    lines[number - 1] = text
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


DAMAGES = {
    "a torn record": (
        "metrics.jsonl",
        2,
        '{"stage": "pol',
        r"metrics\.jsonl, line 2 is damaged: b'\{\"stage\": \"pol'",
    ),
    "no object": ("metrics.jsonl", 3, "[1, 2]", r"metrics\.jsonl, line 3 is damaged: b'\[1, 2\]' is no object"),
    "no step": (
        "metrics.jsonl",
        1,
        '{"stage": "policy"}',
        r"metrics\.jsonl, line 1 has no step: expected a whole number",
    ),
    "no seconds": ("metrics.jsonl", 1, '{"stage": "policy", "step": 0}', r"metrics\.jsonl, line 1 has no seconds"),
    "no samples": (
        "completions.jsonl",
        1,
        '{"step": 0}',
        r"completions\.jsonl, line 1 has no samples: expected a list",
    ),
    "a text for a number": (
        "metrics.jsonl",
        2,
        '{"stage": "policy", "step": 1, "seconds": 1.5, "reward": "0.5"}',
        r'metrics\.jsonl, line 2: reward is "0\.5": expected a number or a boolean or null',
    ),
    "a step without its stage": ("metrics.jsonl", 2, '{"step": 1, "seconds": 1.5}', r"line 2 has no stage"),
    "a note of no step": (
        "metrics.jsonl",
        2,
        '{"step": "a", "loss": "b"}',
        r'line 2: step is "a": expected a whole number',
    ),
    "an option": ("config.json", 1, '{"seed": ', r"config\.json, line 2 is damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(tmp_path, capsys, name):
    file, number, text, message = DAMAGES[name]
    folder = write_run(tmp_path / "a", steps=4)
    break_line(folder, file, number, text)
    with pytest.raises(ValueError, match=message):
        read_run(folder)
    assert main(["report", str(folder)]) == 1
    assert file in capsys.readouterr().err and not (folder / "report.html").exists()


@pytest.mark.parametrize("last", [b"\x80\x81", b"x", b"[1, 2]", b"3 lines", b"null"])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_last_line_that_no_writer_is_at_work_on_is_damage(tmp_path, steps, last):
    """A record is written from its brace on: the report said that no step was recorded yet."""
    folder = write_run(tmp_path / "a", steps=steps, finished=False)
    file = folder / "metrics.jsonl"
    file.write_bytes((file.read_bytes() if steps else b"") + last)
    with pytest.raises(ValueError, match=rf"metrics\.jsonl, line {steps + 1} is damaged"):
        read_run(folder)


@pytest.mark.parametrize("name", ["x.pdf", "x", "x.html.gz", "x.json", ".", "folder"])
def test_a_report_of_another_kind_than_html_is_refused(tmp_path, capsys, name):
    folder, output = write_run(tmp_path / "a", steps=2), tmp_path / name
    assert main(["report", str(folder), "--output", str(output)]) == 1
    assert f"--output {output}: a report is one HTML file; give a name that ends with .html" in capsys.readouterr().err
    assert not output.is_file()


ODD = {
    **{"a text": "x", "digits": "5", "null": None, "true": True, "a list": [1, "a"], "no entries": []},
    **{"an object": {"a": {"b": [1]}}, "nothing": {}, "NaN": math.nan, "infinite": math.inf, "huge": 10**400},
    **{"negative": -7, "a half": 1.5, "gone": ...},
}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run that has every file that a report reads, and every entry in them."""
    folder = write_run(tmp_path_factory.mktemp("edited") / "a", steps=2)
    write_lines(folder / "memory.jsonl", memory_lines(steps=2))
    write_lines(folder / "completions.jsonl", [{"step": 0, "samples": [sample(0)]}])
    census = {"name": "a.jsonl", "files": 1, "read": 9, "left_out": {"long": 1}, "held_out": 2, "trained": 6}
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"census": {"data": census}, "versions": {"python": "3"}, "gain": {"mean": 0.5, "low": 0.4, "high": 0.6}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def edits(value, odd):
    """The value once for each entry in it, near the beginning of a list, with something odd in the entry's place."""
    keys = list(value) if isinstance(value, dict) else range(len(value))[:2] if isinstance(value, list) else ()
    for key in keys:
        for part in [odd, *edits(value[key], odd)]:
            edited = value.copy()
            if part is ...:
                del edited[key]
            else:
                edited[key] = part
            yield edited


@pytest.mark.long
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", FILES)
def test_whatever_stands_in_an_entry_is_reported_or_named(whole_run, name, odd):
    """A report is written, or one line says where the entry is. Two runs, which are compared."""
    file, other = whole_run / name, read_run(whole_run)
    other = replace(other, config={**other.config, "seed": 1})
    text = file.read_text("utf-8")
    lines = [json.loads(line) for line in text.splitlines()] if file.suffix == ".jsonl" else [json.loads(text)]
    tried = 0
    try:
        for number in {0, len(lines) - 1}:
            for line in edits(lines[number], ODD[odd]):
                tried += 1
                write_lines(file, [*lines[:number], line, *lines[number + 1 :]])
                try:
                    assert "made" in json.loads(encoded(content([read_run(whole_run), other])))
                except ValueError as error:
                    where = f"{file}, line {number + 1}" if file.suffix == ".jsonl" else str(file)
                    assert re.match(rf"{re.escape(where)}(: .+ is .+| has no .+): expected .+", str(error)), error
    finally:
        file.write_text(text, "utf-8")
    assert tried >= 5


def test_what_is_no_run_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    begun = write_run(tmp_path / "begun", steps=0, finished=False)
    for folder, message in {
        tmp_path / "nowhere": "is no folder",
        tmp_path / "empty": "has no config.json and no metrics.jsonl: it is not a run's folder",
        begun: "no step is recorded yet in",
    }.items():
        assert main(["report", str(folder)]) == 1
        assert message in capsys.readouterr().err


def test_a_replaced_engine_is_found_by_the_name_that_the_trainer_gives_the_metric(tmp_path):
    """The name is the trainer's own, so that neither can change alone."""
    policy = SimpleNamespace(replaced_engines=0, last_sync=None)
    rollout = SimpleNamespace(methods={"take_weights": None, "prove_weights": None})
    replaced = Replaced(cast(PolicyEngines, SimpleNamespace(policy=policy, rollout=rollout)))
    records = []
    for step, count in enumerate((0, 1, 1, 3)):
        policy.replaced_engines = count
        records.append(record(step) | replaced.metrics())
    write_lines(write_run(tmp_path / "a", steps=1) / "metrics.jsonl", records)
    assert warnings_of(read_run(tmp_path / "a")) == [
        "engines were replaced in steps policy 1, policy 3 (weights/engine_replaced)"
    ]


def test_warnings_name_the_steps(tmp_path):
    folder = write_run(tmp_path / "a", steps=1)
    records = [
        record(0, skipped=1.0),
        record(1, **{"mismatch/alarm": 1.0}),
        record(2, attempt=2, grad_norm=float("nan")),
        record(3, attempt=2, errors=0.25),
        {"step": 4, "changed": ["--seed was 0 and is 1"], "run": "a", "attempt": 2, "time": 1.0},
    ]
    write_lines(folder / "metrics.jsonl", records)
    assert warnings_of(read_run(folder)) == [
        "updates of the trained model skipped in step policy 0: a loss or gradient was not finite",
        "the rollout samples from another policy than the trainer's in step policy 1 (mismatch/alarm)",
        "environments failed in step policy 3 (errors)",
        "grad_norm not finite in step policy 2",
        "taken up again at step policy 2",
        "after 4 records: changed: --seed was 0 and is 1",
    ]
    write_lines(folder / "metrics.jsonl", [record(step, skipped=1.0) for step in range(10)])
    assert "in steps policy 0, policy 1," in warnings_of(read_run(folder))[0]
    assert "policy 7 and 2 more: a loss" in warnings_of(read_run(folder))[0]


def test_slow_steps_are_those_since_the_record_before(tmp_path):
    folder = write_run(tmp_path / "a", steps=1)
    times = [1.0, 2.0, 7.0, 8.5]
    records = [record(step, trainer_idle_seconds=0.25) | {"seconds": time} for step, time in enumerate(times)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    found = slowest_steps(read_run(folder))
    assert [(row["step"], row["seconds"]) for row in found["rows"]] == [(2, 5.0), (3, 1.5), (1, 1.0)]
    assert found["medians"] == {"policy": 1.5} and found["rows"][0]["phases"] == {"trainer_idle": 0.25}
