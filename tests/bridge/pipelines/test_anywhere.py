"""A run, and a run that is taken up again, are the same bit for bit wherever and whenever they go on.

The other place is one process with another clock, day, time zone, locale, working folder, umask, home, hash seed and
number of threads, all at once.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from rl_bridge.models import chat_templates
from rl_bridge.models.small import character_tokenizer
from rl_bridge.modules import trainable
from rl_tools.cli import main
from tests.bridge.pipelines.conftest import words_of
from tests.support.results import assert_same, checkpoint, metrics, result

pytestmark = pytest.mark.long

ELSEWHERE = """
import json, os, sys, time
DAYS = 400 * 86400 + 12345
now, now_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: now() + DAYS, lambda: now_ns() + DAYS * 10**9
os.umask(0o077)
import torch
from rl_tools.cli import main
assert torch.get_num_threads() == 2
sys.exit(max(main(words) for words in json.loads(sys.argv[1])))
"""
ENVIRONMENT = {
    "TZ": "Pacific/Kiritimati",
    "LC_ALL": "POSIX",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONHASHSEED": "12345",
    "OMP_NUM_THREADS": "2",
}
POLICY = {
    "--sft.steps": 1,
    "--sft.rows-per-step": 4,
    "--policy.steps": 2,
    "--policy.prompts-per-step": 2,
    "--policy.sampling.n": 2,
    "--policy.evaluate-every": 1,
    "--checkpoint-every": 1,
    "--held-out": 4,
    "--samples-every": 1,
}
SFT = {"--steps": 2, "--rows-per-step": 4, "--evaluate-every": 1, "--checkpoint-every": 1, "--held-out": 4}
REWARD = """
NAMES = {"größe", "weiß", "ß"}  # A reward may read its set in any order.

def score(completion, row):
    return len(completion) + sum(map(len, NAMES & {row["note"]})) / 8
"""


class Killed(BaseException):
    """Nothing of the run's own code handles it."""


@pytest.fixture
def files(tmp_path, model_folder):
    """Rows, a reward and a model in a folder, by names that are relative to it."""
    folder = tmp_path / "here"
    shutil.copytree(model_folder, folder / "tiny")
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a), "response": str(2 * a), "note": "größe"} for a in range(12)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text, "utf-8")
    (folder / "score.py").write_text(REWARD, "utf-8")
    return folder


def words(kind, name, folder, files, **changes):
    """The words of a command whose files are named by their whole paths, without a number of threads."""
    places = {"--data": files / "rows.jsonl"} if files else {"--data": "rows.jsonl"}
    model = files / "tiny" if files else "tiny"
    if kind == "sft":
        options = {"--output": folder, "--model": model, "--name": name, **places, **SFT, **changes}
        return ["train", "sft", *(str(word) for pair in options.items() for word in pair)]
    places["--reward"] = f"{files / 'score.py' if files else 'score.py'}:score"
    all_words = words_of(folder, model, name, "objective:grpo", **places, **POLICY, **changes)
    at = all_words.index("--threads")
    return [*all_words[:at], *all_words[at + 2 :]]


def killed(command, update):
    """Kill a run in its update of this number, from 1."""
    step, updates = trainable.Trainable.optimizer_step, []

    def dying(self):
        updates.append(1)
        if len(updates) == update:
            raise Killed
        return step(self)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(trainable.Trainable, "optimizer_step", dying)
        main(command)


def outcome(folder):
    """All that a run leaves behind but the folder's name and the number of threads that it began with."""
    if (folder / "samples.json").exists():
        of_run = result(folder)
    else:  # supervision samples nothing
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
        of_run = {
            "weights": (folder / "model" / "model.safetensors").read_bytes(),
            "metrics": metrics(folder),
            "summary": {name: value for name, value in summary.items() if name != "seconds"},
            "state": checkpoint(max((folder / "checkpoints").iterdir())),
        }
    del of_run["state"]["driver"]["state"]["cached_results"]["threads"]
    of_run["summary"] = json.loads(json.dumps(of_run["summary"]).replace(str(folder), "FOLDER"))
    return of_run


def test_a_run_and_a_resume_are_the_same_in_another_place(tmp_path, files):
    for kind in ("sft", "policy"):
        assert main(words(kind, f"{kind}-whole", tmp_path / "runs", files)) == 0
    # In the second step: GRPO has a step of supervision before, and two updates a step.
    killed(words("policy", "policy-there", tmp_path / "runs", files), update=1 + 2 + 1)
    for place in ("elsewhere", "home"):
        (tmp_path / place).mkdir()
    commands = [
        words("sft", "sft-there", tmp_path / "runs", files),
        [*words("policy", "policy-there", tmp_path / "runs", files), "--resume"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, json.dumps(commands)],
        env={**os.environ, **ENVIRONMENT, "HOME": str(tmp_path / "home")},
        cwd=tmp_path / "elsewhere",
        capture_output=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert b"1 CPU threads as at the beginning of the run, where this process would take 2" in done.stdout
    for kind in ("sft", "policy"):
        of_runs = [outcome(tmp_path / "runs" / f"{kind}-{place}") for place in ("there", "whole")]
        assert_same(*of_runs, kind)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_relative_paths_of_a_run_are_found_again_or_named(tmp_path, files, monkeypatch, capsys):
    """A run that goes on from another working folder finds the same files there, or names the one that is missing."""
    monkeypatch.chdir(files)
    command = words("policy", "run", tmp_path / "runs", None)
    assert main(words("policy", "whole", tmp_path / "runs", None)) == 0
    killed(command, update=1 + 2 + 1)
    record = (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(files, elsewhere)
    monkeypatch.chdir(elsewhere)
    for name in ("rows.jsonl", "score.py", "tiny"):
        (elsewhere / name).rename(tmp_path / name)
        capsys.readouterr()
        assert main([*command, "--resume"]) == 1
        message = capsys.readouterr().err
        assert name in message and message.count("\n") == 1
        (tmp_path / name).rename(elsewhere / name)
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes() == record
    assert main([*command, "--resume"]) == 0
    assert_same(outcome(tmp_path / "runs" / "run"), outcome(tmp_path / "runs" / "whole"))


DATED = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("seconds, date", [("0", "01 Jan 1970"), ("1764201600", "27 Nov 2025")])
def test_a_template_s_date_is_one_for_a_whole_run_and_resumes_compare_it(seconds, date, monkeypatch):
    """Llama 3.2's template writes today's date: prompts of the next day, or behind midnight, were others."""
    tokenizers = [character_tokenizer("0123456789JanNov ") for _ in range(2)]
    messages = [{"role": "user", "content": "5"}]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", seconds)
    chat_templates._moment.cache_clear()
    try:
        for tokenizer in tokenizers:
            tokenizer.chat_template = DATED
        assert chat_templates.rendered(tokenizers[0], messages, generation_prompt=False) == f"{date}5"
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
        chat_templates._moment.cache_clear()
        assert chat_templates.rendered(tokenizers[0], messages, generation_prompt=False) == f"{date}5"
        ((name, written),) = chat_templates.dates_of(tokenizers[0]).items()
        ((_, other),) = chat_templates.dates_of(tokenizers[1]).items()
        assert written == date and other == "01 Jan 1970" and "SOURCE_DATE_EPOCH" in name
    finally:
        chat_templates._moment.cache_clear()
    tokenizers[0].chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert chat_templates.dates_of(tokenizers[0]) == {}
