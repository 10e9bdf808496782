"""One file that loads nothing, runs its own script alone, and is whole at every moment."""

import base64
import hashlib
import html.parser
import json
import math
import re
import threading
import time

import pytest

import rl_fn
from rl_tools.cli import main
from rl_tools.report import page
from rl_tools.report.run_files import read_run
from rl_tools.report.sections import completions_of, equation_of, memory_of, parts_of
from tests.bridge.tools.report.runs import NAUGHTY, memory_lines, write_lines, write_run, write_study


class Elements(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text, self.inside = [], {}, False

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

        self.inside = True

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.text.setdefault(len(self.tags), []).append(data)


def parsed(file):
    reader = Elements()
    reader.feed(file.read_text("utf-8"))
    reader.close()
    texts = [(tag, attributes, "".join(reader.text.get(n + 1, []))) for n, (tag, attributes) in enumerate(reader.tags)]
    return texts


def test_text_of_a_model_stays_text(tmp_path):
    folder = write_run(tmp_path / f"run{NAUGHTY[-4:-3]}", steps=12)
    assert main(["report", str(folder), "--title", NAUGHTY.replace("\0", "")]) == 0
    file = folder / "report.html"
    elements = parsed(file)
    scripts = [(attributes, text) for tag, attributes, text in elements if tag == "script"]
    assert [attributes.get("type") for attributes, _ in scripts] == ["application/json", None]
    found = json.loads(scripts[0][1])
    assert found["completions"][0]["steps"][0]["samples"][0]["prompt"] == NAUGHTY
    assert found["samples"][0]["greedy"][0]["before"]["completion"] == "42"
    raw = file.read_bytes()
    assert raw.count(b"</script") == 2 and b"<b>" not in raw
    text = file.read_text("utf-8")
    assert not any(character in text for character in "\u202e\u2066\u2028\0\x1b")


def test_nothing_is_loaded_and_no_other_script_runs(tmp_path):
    assert main(["report", str(write_run(tmp_path / "a", steps=12)), "-o", str(tmp_path / "r.html")]) == 0
    elements = parsed(tmp_path / "r.html")
    for tag, attributes, _ in elements:
        assert tag not in ("link", "img", "iframe", "object", "embed") and "src" not in attributes
        assert not any(name.startswith("on") for name in attributes) and "style" not in attributes
    (policy,) = [a["content"] for t, a, _ in elements if t == "meta" and a.get("http-equiv")]
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    for tag in ("script", "style"):
        (text,) = [text for t, a, text in elements if t == tag and "type" not in a]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
        # An SVG element's namespace is a name; nothing is read from there.
        assert re.findall(r"https?://[^\"]*", text) == (["http://www.w3.org/2000/svg"] if tag == "script" else [])
        assert "innerHTML" not in text and "eval(" not in text and "@import" not in text


def test_a_running_run_is_watched_to_its_end(tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "a", steps=12, finished=False)
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("", encoding="utf-8")
    seen = []

    wait, here = time.sleep, threading.get_ident()

    def pause(seconds):
        if threading.get_ident() != here:  # a thread of the process that watches something else
            return wait(seconds)
        file = folder / "report.html"
        seen.append(json.loads(parsed(file)[-1 - 1][2])["runs"][0]["records"] if file.exists() else 0)
        moment = len(seen)
        if moment == 1:
            (folder / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:20], encoding="utf-8")
        elif moment == 3:
            (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
        elif moment == 4:
            (folder / "summary.json").write_text("{}", encoding="utf-8")

    monkeypatch.setattr(page.time, "sleep", pause)
    assert main(["report", str(folder), "--watch", "3"]) == 0
    # Nothing yet; five records; nothing new; all of them; the end.
    assert seen == [0, 5, 5, 12] and capsys.readouterr().out.count("report.html") == 3
    assert [path.name for path in folder.glob(".*")] == []
    assert main(["report", str(tmp_path / "nowhere"), "--watch"]) == 1
    assert main(["report", str(folder), "--watch", "0"]) == 1
    assert "--watch takes seconds above 0" in capsys.readouterr().err


def test_every_recipe_has_its_equation():
    for name in rl_fn.recipes.__all__:
        equation = equation_of({"objective": {"algorithm": name, "kl": {"coef": 0.5}}}, {})
        assert equation["name"] == name and equation["constants"] == {"kl.coef": "0.5"}
        parts = [part for line in equation["published"] for part in line]
        assert {kind for kind, _ in parts} <= {"text", "var", "code", "sub", "sup"}, name
        assert {"A", "r", "π", "R", "ρ"} & {text for kind, text in parts if kind == "var"}, (name, parts)


def test_an_equation_is_set_as_it_reads():
    assert parts_of("ℓ = −min(ρA, 1e-06) ε_high") == [
        ("var", "ℓ"), ("text", " = −min("), ("var", "ρ"), ("var", "A"), ("text", ", 1e-06) "), ("var", "ε"),
        ("sub", "high"),
    ]  # fmt: skip
    assert equation_of({"loss": {"loss": "simpo", "beta": 2.0}}, {})["constants"] == {"beta": "2.0"}
    assert equation_of({"sft": {}}, {}) is None


def test_completions_are_thinned_to_the_room_there_is(tmp_path):
    folder = write_run(tmp_path / "a", steps=400)
    run = read_run(folder)
    assert len(run.completions) == 40
    (whole,) = completions_of([run])
    assert whole["left_out"] == 0 and len(whole["steps"]) == 40
    (few,) = completions_of([run], room=len(json.dumps(run.completions)) // 5)
    steps = [line["step"] for line in few["steps"]]
    assert steps[0] == 0 and steps[-1] == 390 and 4 <= len(steps) <= 9 and few["left_out"] == 40 - len(steps)


def test_a_study_is_a_report_too(tmp_path, capsys):
    folder = write_study(tmp_path / "study", trials=6)
    assert main(["report", str(folder)]) == 0
    shown = json.loads(next(text for tag, _, text in parsed(folder / "report.html") if tag == "script"))
    (study,) = shown["studies"]
    assert shown["runs"] == [] and shown["title"] == "study"
    assert [trial["status"] for trial in study["trials"]] == [*["complete"] * 3, "failed", "complete", "running"]
    rate, clip = study["parameters"]
    assert rate["ends"] == ["1e-05", "0.1"] and clip["choices"] == ["low", NAUGHTY]
    for trial in study["trials"]:
        assert trial["places"][0] == pytest.approx(
            (math.log10(float(trial["assignment"]["optimizer.learning_rate"])) + 5) / 4, abs=1e-5
        )
    assert [trial["places"][1] for trial in study["trials"]] == [1.0, None, 0.0, None, 1.0, None]
    assert study["said"][0].startswith("6 trials: 4 complete, 1 failed, 1 running")
    with (folder / "journal.jsonl").open("r+b") as stream:
        stream.write(b"damage")
    assert main(["report", str(folder)]) == 1
    assert "journal.jsonl, line 1 is damaged" in capsys.readouterr().err


def test_memory_is_drawn_where_it_was_profiled(tmp_path, capsys):
    folder = write_run(tmp_path / "a", steps=3)
    assert memory_of([]) is None
    write_lines(folder / "memory.jsonl", memory_lines(steps=2))
    found = memory_of(read_run(folder).memory)
    sizes, parts, within = found["charts"]
    assert sizes["x"] == [0, 1] and sizes["columns"] == {
        "peak": [3.0, 4.0],
        "after the step": [1.0, 1.0],
        "process (RSS)": [9.0, 9.0],
    }
    assert parts["columns"] == {"weights": [1.0, 1.0], "activations": [2.0, 3.0]}
    # Two calls of half a second, one behind the other.
    assert within["title"] == "components within step 1" and within["x"] == [0.0, 0.25, 0.5, 0.75]
    assert within["columns"]["activations"] == [0.0, 3.0, 0.0, 1.0]
    assert [(peak["phase"], peak["step"], peak["peak"]) for peak in found["peaks"]] == [
        ("update", 1, 4.0),
        ("sync", 0, 2.0),
    ]
    write_lines(folder / "memory.jsonl", [{"phase": "update"}])
    assert main(["report", str(folder)]) == 1
    assert "memory.jsonl, line 1 has no step" in capsys.readouterr().err
