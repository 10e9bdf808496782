"""Run files on the command line: a dry run, a plan, a study."""

import json
import re
from dataclasses import replace
from functools import partial
from operator import attrgetter

import pytest

from rl_bridge.common.terminal import remarks
from rl_bridge.models.small import TinySource
from rl_bridge.run.run_toml import RUN_FILE, toml_of
from rl_tools.cli import main
from rl_tools.trainer_options import TRAINERS, load, options_of
from rl_tools.trainers import config_of, expanded
from rl_train.policy_configs import quickstart

SMALL = {
    "policy": "held-out = 4\n[policy]\nsteps = 2\nprompts-per-step = 4\n[sft]\nsteps = 1\nrows-per-step = 4\n",
    "sft": "held-out = 4\nsteps = 2\n",
    "preference": "held-out = 4\nsteps = 2\n",
    "reward-model": "held-out = 4\nsteps = 2\n",
}


ANSWERED = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
COMPARED = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "0"} for row in ANSWERED]
ROWS = {"policy": ANSWERED, "sft": ANSWERED, "preference": COMPARED, "reward-model": COMPARED}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A new model has one layer and not four: a plan goes through all operations of each."""
    monkeypatch.setattr(TinySource, "for_tokenizer", partial(TinySource.for_tokenizer, hidden=16, layers=1))


@pytest.mark.long
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_dry_run_prints_options_and_memory_and_writes_nothing(trainer: str, tmp_path, capsys):
    data, file = tmp_path / "rows.jsonl", tmp_path / "my.toml"
    data.write_text("\n".join(map(json.dumps, ROWS[trainer])))
    file.write_text(f'trainer = "{trainer}"\ndata = "{data}"\noutput = "{tmp_path}"\n{SMALL[trainer]}')
    assert main(["train", str(file), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f'trainer = "{trainer}"\n' in printed and "held-out = 4\n" in printed and "\nsteps = 2\n" in printed
    assert "rows, model and reward are as the run needs them" in printed and "the most is " in printed
    assert set(tmp_path.iterdir()) == {data, file}


@pytest.mark.parametrize("flag", ["--resume", "--resume-anyway"])
def test_a_dry_run_takes_no_run_up(flag, tmp_path, capsys):
    """It would pass where the run is refused: there is no such run, or it has other options."""
    with pytest.raises(SystemExit, match="2"):
        main(["train", "sft", "--output", str(tmp_path), "--dry-run", flag])
    assert "--dry-run ends before" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_dry_run_refuses_what_the_run_would_refuse(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "anwser": "2"}) + "\n")
    assert main(["train", "policy", "--data", str(rows), "--output", str(tmp_path), "--dry-run"]) == 1
    assert "rows.jsonl, row 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [rows]


@pytest.mark.long
def test_a_plan_is_of_a_run_file_with_options_over_it(tmp_path, capsys):
    start, data = quickstart(), tmp_path / "rows.jsonl"
    rows = [{"prompt": f"1{a}+1{b}=", "answer": str(20 + a + b)} for a in range(4) for b in range(4)]
    data.write_text("\n".join(map(json.dumps, rows)))
    small = replace(
        start,
        data=str(data),
        micro_batch_tokens=99,
        held_out=4,
        sft=replace(start.sft, rows_per_step=4),
        policy=replace(start.policy, prompts_per_step=4, updates_per_step=1),
    )
    (tmp_path / RUN_FILE).write_text(toml_of(small, "policy"))
    for words in ([str(tmp_path)], [str(tmp_path / RUN_FILE)]):
        assert main(["plan", *words, "--no-knobs"]) == 0
        assert "4 prompts of 6 tokens, 4 completions each of 5; micro-batches of 99 tokens" in capsys.readouterr().out
    assert main(["plan", str(tmp_path), "--no-knobs", "--micro-batch-tokens", "98"]) == 0
    assert "micro-batches of 98 tokens" in capsys.readouterr().out


NOT_ONE = {
    "": "give a trainer, one of sft, ",
    "--no-knobs": "give a trainer, one of sft, ",
    "runs/nothere": "'runs/nothere' is no trainer (sft, ",
    "rows.jsonl": "'rows.jsonl' is no trainer (sft, ",
    "polcy": "no folder with run.toml; did you mean policy?",
    "--seed=1 sft": "give a trainer or run file in front of all options: sft --seed=1",
}


@pytest.mark.parametrize("words", NOT_ONE)
def test_what_is_neither_a_trainer_nor_a_run_is_named(words):
    with pytest.raises(ValueError, match=re.escape(NOT_ONE[words])):
        expanded(words.split())


@pytest.mark.parametrize("words", [["polcy"], ["runs/nothere"], ["no.jsonl", "--seed", "1"]])
@pytest.mark.parametrize("command", ["train", "plan", "tune"])
def test_every_command_refuses_what_is_no_trainer_in_one_way(command, words, capsys):
    with pytest.raises(ValueError) as error:
        expanded(words)
    assert main([command, *words]) == 2
    assert capsys.readouterr() == ("", f"rl-fn: error: {error.value}\n")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_table_of_options_is_no_value(trainer, tmp_path):
    """The tables of every recipe too, as objective.kl."""
    options = options_of(load(TRAINERS[trainer].default)())
    names = [*options.kinds, *options.of_recipes]
    tables = {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)} - options.recipes.keys()
    assert tables
    for table in sorted(tables):
        (tmp_path / "run.toml").write_text(f'trainer = "{trainer}"\n{table} = 3\n')
        with pytest.raises(
            ValueError, match=rf"run\.toml: {table} is a table, with {table}\.[a-z.-]+ and others; got "
        ):
            expanded([str(tmp_path)])


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_recipe_of_another_trainer_is_named_with_it(trainer, tmp_path, capsys):
    recipes = {name: options_of(load(other.default)()).recipes for name, other in TRAINERS.items()}
    words = {f"{part}:{recipe}" for own in recipes.values() for part, names in own.items() for recipe in names}
    own = {f"{part}:{recipe}" for part, names in recipes[trainer].items() for recipe in names}
    for word in sorted(words - own):
        part, _, recipe = word.partition(":")
        owners = ", ".join(f"train {name}" for name in TRAINERS if recipe in recipes[name].get(part, {}))
        with pytest.raises(SystemExit, match="2"):
            main(["train", trainer, word])
        assert (said := capsys.readouterr().err).startswith(f"rl-fn: error: {word} is of {owners}")
        for line in (f'{part} = "{recipe}"', f'{part}.name = "{recipe}"'):
            (tmp_path / "run.toml").write_text(f'trainer = "{trainer}"\n{line}\n')
            with pytest.raises(ValueError) as error:
                expanded([str(tmp_path)])
            assert said.splitlines()[0] == f"rl-fn: error: {error.value}".replace(f"{tmp_path / 'run.toml'}: ", "")
    assert words - own


def test_a_study_has_the_options_of_a_file_but_its_own(tmp_path, monkeypatch):
    from rl_tools.tune import study

    (tmp_path / RUN_FILE).write_text(toml_of(replace(quickstart(), name="x", seed=7, packing=True), "policy"))
    studies = []

    class Stopped(Exception):
        pass

    def keep(of, resume):
        studies.append(of)
        raise Stopped

    monkeypatch.setattr(study, "run_study", keep)
    from rl_tools.tune import tune_command

    with pytest.raises(Stopped):
        tune_command.run(
            [str(tmp_path), "--space.optimizer.learning-rate", "log:1e-5..1e-3", "--output", str(tmp_path)]
        )
    fixed = studies[0].about["fixed"].split()
    assert "--packing" in fixed and "--policy.steps=240" in fixed and "objective:dapo" in fixed
    assert not any(word.startswith(("--seed", "--name", "--output", "--optimizer.learning-rate")) for word in fixed)
    assert studies[0].about["trainer"] == "policy" and studies[0].folder == tmp_path / "tune"


LAYERS = {
    "a preference": ("preference", "loss", "dpo", {"beta": 0.3}, "simpo", {"average": True}),
    "an objective": ("policy", "objective", "dapo", {"clip-high": 0.4}, "gspo", {"kl.coef": 0.01}),
}
"""Trainer, part, a recipe with constants, another recipe that has constants of these names, options of every recipe."""


@pytest.mark.parametrize("over", ["file", "word", "the same again"])
@pytest.mark.parametrize("layers", LAYERS)
def test_constants_are_of_the_recipe_that_their_file_names(layers, over, tmp_path):
    trainer, part, recipe, constants, other, shared = LAYERS[layers]
    lines = (f"{name} = {str(value).lower()}" for name, value in {**constants, **shared}.items())
    base, above = tmp_path / "base.toml", tmp_path / "above.toml"
    base.write_text(f'trainer = "{trainer}"\n[{part}]\nname = "{recipe}"\n' + "\n".join(lines))
    taken = recipe if over == "the same again" else other
    above.write_text(f'[{part}]\nname = "{taken}"\n')
    words = [str(base), *([f"{part}:{taken}"] if over == "word" else [str(above)])]
    remarks()
    _, config = config_of(words, "train")
    own, plain_one = getattr(config, part), getattr(config_of([trainer, f"{part}:{taken}"], "train")[1], part)
    for name, value in constants.items():
        expected = value if taken == recipe else getattr(plain_one, name.replace("-", "_"))
        assert getattr(own, name.replace("-", "_")) == expected
    for name, value in shared.items():
        assert attrgetter(name)(own) == value
    told = [line for line in remarks() if f"{part}.{next(iter(constants))} are not read" in line]
    assert len(told) == (taken != recipe)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("tokens", [0, -1])
@pytest.mark.parametrize("option", ["--prompt-tokens", "--completion-tokens", "--workers"])
def test_a_plan_refuses_a_length_below_1(trainer, tokens, option, capsys):
    """With 0 the plan was of the data's own length, without a word."""
    assert main(["plan", trainer, option, str(tokens)]) == 1
    printed = capsys.readouterr()
    assert printed.err == f"rl-fn: error: {option} must be at least 1, got {tokens}\n" and not printed.out
