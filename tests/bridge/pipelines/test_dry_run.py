"""A dry run reads the models' weights and compares a class of the user's own, as the run does when it begins."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_bridge.models.model_source import PretrainedSource, ValueSource
from rl_bridge.models.pretrained import save_pretrained
from rl_bridge.models.small import character_tokenizer, tiny_qwen2
from rl_bridge.pipelines import dry_run
from rl_tools.cli import main

pytestmark = pytest.mark.long

ROLES = {
    "of supervision": "sft --model {bad}",
    "of pairs": "preference --model {bad}",
    "of a reward model": "reward-model --model {bad}",
    "a policy": "policy --model {bad}",
    "a reward": "policy --model {whole} --reward model:{bad_scorer}",
    "a critic": "policy --model {whole} --critic.model {bad_scorer} objective:ppo",
    "a teacher": "policy --model {whole} --teacher {bad} objective:on-policy-distillation",
}
NUMBERS = [float("nan"), float("inf"), -float("inf"), 1e39]
ROWS = {
    "policy": {"answer": "3"},
    "sft": {"response": "3"},
    "preference": {"chosen": "3", "rejected": "4"},
    "reward-model": {"chosen": "3", "rejected": "4"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, a scorer among them, of which the last number of a weight is NaN; and rows."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = character_tokenizer("0123456789+=")
    save_pretrained(folder / "whole", tiny_qwen2(tokenizer, hidden=16, layers=1, heads=2), tokenizer)
    shutil.copytree(folder / "whole", folder / "bad")
    shutil.copytree(folder / "whole", folder / "bad_scorer")
    source = ValueSource(PretrainedSource(str(folder / "whole")), seed=1)
    with torch.device("meta"):
        model = source.empty()
    source.load(model)
    model.save_pretrained(folder / "bad_scorer")
    for trainer, fields in ROWS.items():
        rows = [{"prompt": f"{number}+1="} | fields for number in range(8)]
        (folder / f"{trainer}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def spoil(folder, number):
    for name in ("bad", "bad_scorer"):
        file = folder / name / "model.safetensors"
        tensors = load_file(file)
        tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
        tensors["model.norm.weight"][-1] = number
        save_file(tensors, file, {"format": "pt"})


def dry(folder, words):
    """The status of a dry run; what it is of stands in front of the recipe."""
    places = {name: folder / name for name in ("whole", "bad", "bad_scorer")}
    before, *recipe = words.format(**places).split(" objective:")
    short = " --policy.sampling.max-new-tokens 4" if before.startswith("policy") else ""
    options = f"{short} --data {folder / before.split()[0]}.jsonl --held-out 2 --output {folder / 'runs'} --dry-run"
    return main(["train", *(before + options).split(), *(f"objective:{name}" for name in recipe)])


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("role", ROLES)
def test_weights_that_are_not_finite_are_refused_in_a_dry_run_too(role, number, folder, capsys):
    spoil(folder, number)
    assert dry(folder, ROLES[role]) == 1
    refused = capsys.readouterr().err
    assert "'model.norm.weight' has 1 of 16 numbers that are NaN or infinite in torch.float32" in refused, refused
    assert str(folder / "bad") in refused and not (folder / "runs").exists()


@pytest.mark.parametrize("role", [role for role in ROLES if role != "a reward"])
def test_weights_that_take_long_to_read_are_left_out_and_a_line_says_so(role, folder, capsys, monkeypatch):
    spoil(folder, float("nan"))
    monkeypatch.setattr(dry_run, "READ", 1)
    assert dry(folder, ROLES[role]) == 0
    assert f"the weights of {folder / 'bad'}" in capsys.readouterr().out


OWN = """import torch
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(14, 8)
        self.head = nn.Linear(8, 14)

    def forward(self, input_ids, position_ids, attention_mask=None):
        x = self.embed(input_ids)
        return self.head({hidden})
"""
AHEAD = "x + x.mean(1, keepdim=True)"


@pytest.mark.parametrize("trainer", ["sft", "preference", "policy"])
def test_a_class_of_one_s_own_is_compared_in_a_dry_run_too(trainer, folder, tmp_path, capsys, monkeypatch):
    (tmp_path / "own.py").write_text(OWN.format(hidden=AHEAD))
    (tmp_path / "right.py").write_text(OWN.format(hidden="x"))
    words = f"{trainer} --tokenizer {{whole}} --model {tmp_path}"
    assert dry(folder, f"{words}/right.py:Own") == 0
    assert dry(folder, f"{words}/own.py:Own") == 1
    assert "Own: padded rows do not give the numbers" in capsys.readouterr().err
    monkeypatch.setattr(dry_run, "COMPARED", 9)
    assert dry(folder, f"{words}/own.py:Own") == 0
    assert "own.py:Own was not compared with its own forward" in capsys.readouterr().out


STEPS = {
    "sft": "--rows-per-step",
    "preference": "--rows-per-step",
    "reward-model": "--rows-per-step",
    "policy": "--policy.prompts-per-step",
    "policy with a warm start": "--sft.steps 1 --sft.rows-per-step",
}


@pytest.mark.parametrize(
    ("trainer", "count"), [("sft", 7), ("sft", 12), *((name, n) for name in STEPS for n in (6, 99))]
)
def test_a_step_of_more_rows_than_there_are_is_remarked_on(trainer, count, folder, capsys, monkeypatch):
    monkeypatch.setattr(dry_run, "READ", 0)
    option = STEPS[trainer].split()[-1]
    assert dry(folder, f"{trainer.split()[0]} --model {{whole}} {STEPS[trainer]} {count}") == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith(f"{option} {count} of ")]
    times = {7: "1 to 2", 12: "2", 99: "16 to 17"}
    assert lines == (
        [f"{option} {count} of 6 rows to train on: every step takes each of them {times[count]} times"]
        if count in times
        else []
    )
