"""Words of ``rl-fn train`` that are no option and no value, and the order in which words may stand."""

import re
import typing
from functools import cache
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_tools import trainer_options
from rl_tools.cli import main
from rl_tools.command_words import in_order, refusals, without_values
from rl_tools.trainer_options import TRAINERS, TrainerOptions, load, options_of
from rl_tools.trainers import config_of, parse


@cache
def options_named(trainer: str) -> TrainerOptions:
    default = load(TRAINERS[trainer].default)
    return options_of(default if isinstance(default, type) else default(()))


def parts(kind: Any) -> set[Any]:
    """The types of a union or of an option's several values."""
    return set(chain.from_iterable(map(parts, typing.get_args(kind)))) if typing.get_args(kind) else {kind}


def of_kinds(*kinds: Any) -> list[tuple[str, str]]:
    """(Trainer, option) of all options of these types."""
    return [(name, option) for name in TRAINERS for option, kind in options_named(name).kinds.items() if kind in kinds]


def test_no_switch_takes_a_value():
    """It was a box with the value alone, or another option's value."""
    switches = of_kinds(bool)
    assert len(switches) > 40
    for trainer, option in switches:
        head, dot, last = option.rpartition(".")
        for value in ("True", "false", "0", "yes"):
            for words in ([f"--{option}", value], [f"--{option}={value}"], [f"--{option.replace('-', '_')}", value]):
                (message,) = refusals(words, options_named(trainer))
                no = f"--{head}{dot}no-{last} is no"
                assert message == f"--{option} takes no value, got {value!r}: --{option} is yes, and {no}"
        assert refusals([f"--{option}"], options_named(trainer)) == []
        assert refusals([f"--{head}{dot}no-{last}"], options_named(trainer)) == []


def test_every_option_of_numbers_names_itself_and_what_is_no_number():
    names = [(t, o) for t in TRAINERS for o, k in options_named(t).kinds.items() if parts(k) & {int, float}]
    assert len(names) > 200
    for trainer, option in names:
        kind = options_named(trainer).kinds[option]
        for value in ("many", "1e-6,1e-5", "1..5", "10%", "0,5"):
            (message,) = refusals([f"--{option}", value], options_named(trainer))
            assert message.startswith(f"--{option} takes ") and f"got {value!r}" in message
            if "," in value:
                advice = (
                    "several stand apart" if "tuple" in str(kind) else "a decimal point|a study tries several values"
                )
                assert re.search(advice, message), message
        (message,) = refusals([f"--{option}"], options_named(trainer)) or [""]
        assert message.startswith(f"--{option} needs a value behind it") != ("tuple" in str(kind))
        for value in ("3", "None")[: 2 if type(None) in parts(kind) else 1]:
            assert refusals([f"--{option}", value], options_named(trainer)) == []


def test_an_option_of_one_value_takes_one():
    one = [
        (t, o) for t in TRAINERS for o, k in options_named(t).kinds.items() if "tuple" not in str(k) and k is not bool
    ]
    for trainer, option in one:
        value = "3" if parts(options_named(trainer).kinds[option]) & {int, float} else "text"
        assert refusals([f"--{option}={value}"], options_named(trainer)) == []
        for words in ([f"--{option}", value, "more"], [f"--{option}={value}", "more"]):
            expected = f"--{option} takes one value, and 'more' is one more"
            assert refusals(words, options_named(trainer)) == [expected], words


def test_every_name_in_other_programs_is_a_word_for_an_option():
    """Of at least one trainer; each of its options that are offered is one."""
    for own, others in trainer_options._ELSEWHERE.items():
        for word in others.split():
            near = [near for name in TRAINERS for near in options_named(name).exact(word)]
            assert any(f".{option}".endswith(f".{own}") for option in near), (own, word)
            for name in TRAINERS:
                options = options_named(name)
                assert set(options.exact(word)) <= {*options.names(), *options.recipes}


PROGRAMS = {
    "sft --report_to wandb": "--report-to: did you mean --trackers?",
    "sft --gradient_accumulation_steps 4": "--gradient-accumulation-steps: did you mean --rows-per-step?",
    "sft --resume_from_checkpoint x": "--resume-from-checkpoint: did you mean --resume?",
    "sft --learning_rate 1e-5": "did you mean --optimizer.learning-rate?",
    "sft --optimizer.Lr 1e-5": "did you mean --optimizer.learning-rate?",
    "policy --pretrain tiny": "--pretrain: did you mean --model",
    "policy --n_samples_per_prompt 8": "--n-samples-per-prompt: did you mean --policy.sampling.n?",
    "policy --actor_rollout_ref.actor.optim.lr 1e-6": "did you mean --optimizer.learning-rate",
    "policy --objective.kl_coef 0.1": "here it is objective:dapo, which has --objective.kl.coef",
    "policy --objective gspo": "--objective: write objective:gspo, one word without dashes in front (there are ",
    "policy --objective.name gspo": "--objective.name: write objective:gspo, one word",
    "policy --algorithm.adv_estimator dr_grpo": "write objective:dr-grpo, one word",
    "preference --loss dpo": "--loss: write loss:dpo, one word",
    "preference --loss_type simpo": "--loss-type: write loss:simpo, one word",
    "policy objective:GRPO": "objective:GRPO: did you mean objective:grpo",
    "preference loss:DPO": "loss:DPO: did you mean loss:dpo",
    "policy objective:q-learning": "there is no objective:q-learning; there are objective:",
    "policy objective:loss.py:loss": "is a part of an objective, objective:grpo --objective.loss loss.py:loss",
    "grpo objective:loss.py:loss": "objective:grpo --objective.loss loss.py:loss",
    "policy objective:grpo objective:ppo": "objective:grpo and objective:ppo: give one of them",
    "policy --reward own.py:f objective=gspo": "'objective=gspo': write objective:gspo",
    "policy --reward own.py:f data.train_files=a.jsonl": "'data.train_files=a.jsonl': write --data a.jsonl",
    "policy --reward own.py:f actor_rollout_ref.actor.optim.lr=1e-6": "write --optimizer.learning-rate 1e-6",
    "policy --reward-weights 1,0.2": "several stand apart: --reward-weights 1 0.2",
    "policy --policy.pass-at 1,4": "several stand apart: --policy.pass-at 1 4",
    "sft --optimizer.learning-rate 0,001": "with a decimal point it is 0.001",
    "sft --optimizer.learning-rate 1e-6,1e-5": "rl-fn tune with --space.optimizer.learning-rate 1e-6,1e-5",
    "sft --steps 1e3": "--steps takes a whole number, got '1e3'; write 1000",
    "sft -steps 3": "'-steps': write --steps",
    "sft \N{EM DASH}steps 3": "write --steps",
    "sft steps=3": "'steps=3': write --steps 3",
    "sft please": "'please' is no option",
    "sft --data a.jsonl b.jsonl": "--data takes one value, and 'b.jsonl' is one more",
    "sft policy": "'policy' is a trainer, and a command has one",
    "sft --steps 3 run.toml": "'run.toml': run files stand in front of all options",
    "sft --packing run.toml": "'run.toml': run files stand in front of all options",
    "policy --config run.toml": "there is no --config: trainers and run files stand without one",
    "--seed 3 run.toml": "give a trainer or run file in front of all options: run.toml --seed 3",
    "--steps 3 sft": "give a trainer or run file in front of all options: sft --steps 3",
    "sft --data a.jsonl --data=b.jsonl": "--data is given twice, and takes one value: a pattern",
    "policy --reward a.py:f --reward b.py:g": "--reward is given twice: give all its values behind one",
    "policy --policy.pass-at 1 --policy.pass-at 4": "--policy.pass-at is given twice: give all its values behind one",
    "sft --output=": "--output needs a value behind it, got an empty text",
    "policy --objective.kl 0.1": "--objective.kl: did you mean --objective.kl.coef",
    "policy --ppo_epochs 4": "there is no --ppo-epochs",
    "policy --reward own.py:f trainer.total_epochs=15": "'trainer.total_epochs=15' is no option",
    "preference --loss.average": "--loss.average needs a value behind it: True or False",
    "sft --resume runs/first": "--resume takes no value, got 'runs/first': a run is found by --output FOLDER",
    "policy --reward --dry-run": "--reward stands without a value",
    "preference loss:dpo --loss.wpo yes": "--loss.wpo takes no value, got 'yes': --loss.wpo is yes, and --loss.no-",
}


@pytest.mark.parametrize("words", PROGRAMS)
def test_a_word_of_another_program_gets_the_word_here(words: str, capsys):
    try:
        status = main(["train", *words.split()])
    except SystemExit as left:
        status = left.code
    said = capsys.readouterr().err
    assert status == 2 and PROGRAMS[words] in said, said
    assert len(said.splitlines()) <= 2 and said.startswith("rl-fn: error: "), "one line, and where all options are"


REWARDS = [
    *("exact", "environment", "own.py:score", "steps=own.py:score", "reward=exact", "model:runs/x", "judge:a=b.toml"),
    *(
        "http://127.0.0.1:9/score",
        "http://127.0.0.1:9/score#timeout=5&retries=0",
        "name=https://a.b/score?steps=3#retries=0",
    ),
]


def test_a_reward_in_any_form_is_no_option_of_another_program():
    """The limits of a reward behind http, as --help writes them, were refused as NAME=VALUE."""
    assert refusals(["--reward", *REWARDS, "--steps=3"], options_named("sft")) == ["there is no --reward"]
    assert refusals(["--reward", *REWARDS], options_named("policy")) == []
    for word in REWARDS:
        assert refusals([f"--reward={word}"], options_named("policy")) == [], word


COMMANDS = {
    "sft": "did you mean rl-fn train sft?",
    "SFT": "did you mean rl-fn train sft?",
    "grpo": "did you mean rl-fn train grpo?",
    "dr_grpo": "did you mean rl-fn train dr-grpo?",
    "dpo": "did you mean rl-fn train dpo?",
    "run.toml": "did you mean rl-fn train run.toml?",
    "frobnicate": "there are train, export",
}


@pytest.mark.parametrize("word", COMMANDS)
def test_what_is_behind_train_is_found_without_it(word: str, capsys):
    assert main([word, "--data", "a.jsonl"]) == 2
    assert f"unknown command {word!r}: {COMMANDS[word]}" in capsys.readouterr().err


UNITS = [
    ["--policy.steps", "3"],
    ["objective:ppo"],
    ["--objective.lam", "0.9"],
    ["--reward", "a=own.py:f", "own.py:g"],
    ["--objective.kl.coef=0.1"],
    ["--no-packing"],
    ["--policy.scalar.ideal", "-1", "2.5"],
]


@given(st.permutations(UNITS))
def test_options_may_stand_on_both_sides_of_a_recipe_in_any_order(units: list[list[str]]):
    """An option of a recipe in front of the recipe's word, and one of the trainer on both sides, were refused."""
    options = options_named("policy")
    words = in_order([word for unit in units for word in unit], options)
    place = words.index("objective:ppo")
    assert sorted(words) == sorted(word for unit in UNITS for word in unit)
    assert {*words[place + 1 :]} == {"--objective.lam", "0.9", "--objective.kl.coef=0.1"}
    assert refusals(words, options) == [] and without_values(words, options) == []


def test_the_config_is_one_in_any_order():
    """The last one of an option that is given twice counts, wherever a recipe stands."""
    words = ["--objective.lam", "0.9", "--policy.steps", "2", "objective:ppo", "--policy.steps", "1"]
    ordered = ["--policy.steps", "1", "objective:ppo", "--objective.lam", "0.9"]
    default = load(TRAINERS["policy"].default)
    configs = [parse(default, words, prog="rl-fn train policy"), config_of(["policy", *ordered], "train")[1]]
    assert configs[0] == configs[1] and configs[0].policy.steps == 1 and configs[0].objective.lam == 0.9
