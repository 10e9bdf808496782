"""Run files: file → options → file, files over one another, options over files, and what a file cannot say."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.pipelines.objective_options import ALGORITHMS
from rl_bridge.run.run_toml import RUN_FILE, is_fixed, toml_of
from rl_tools.cli import COMMANDS
from rl_tools.trainer_options import TRAINERS, algorithms, load, options_of
from rl_tools.trainers import config_of, expanded, parse
from rl_train.compared import LOSSES, REWARD_MODEL_LOSSES
from rl_train.policy_configs import policy, quickstart
from rl_train.preference import PreferencePipeline
from rl_train.reward_model import RewardModelPipeline


def read(file: Path, *words: str) -> tuple[str, Any]:
    return config_of([str(file), *words], "train")


def returns(config: Any, folder: Path) -> None:
    (folder / RUN_FILE).write_text(toml_of(config, config.trainer), "utf-8")
    trainer, again = read(folder / RUN_FILE)
    assert (trainer, again) == (config.trainer, config)
    assert toml_of(again, trainer) == (folder / RUN_FILE).read_text("utf-8")


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_a_run_with_every_algorithm_is_its_file(algorithm: str, tmp_path):
    objective = ALGORITHMS[algorithm]()
    teacher = "some/model" if "teacher_logprobs" in objective.build().required_rollout_fields else None
    start = quickstart()
    sampling = replace(start.policy.sampling, n=8)  # passk compares sets of 4
    policy = replace(start.policy, sampling=sampling, recompute_old_logprobs=algorithm == "decoupled_ppo")
    returns(replace(start, objective=objective, teacher=teacher, policy=policy), tmp_path)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_a_run_with_every_loss_of_policies_is_its_file(loss: str, tmp_path):
    returns(PreferencePipeline(loss=LOSSES[loss]()), tmp_path)


@pytest.mark.parametrize("loss", sorted(REWARD_MODEL_LOSSES))
def test_a_run_with_every_loss_of_reward_models_is_its_file(loss: str, tmp_path):
    returns(RewardModelPipeline(loss=REWARD_MODEL_LOSSES[loss]()), tmp_path)


@pytest.mark.parametrize("value", [True, False, None])
def test_a_switch_that_may_be_left_to_the_recipe_is_in_its_file(value: bool | None, tmp_path):
    returns(PreferencePipeline(loss=LOSSES["dpo"](average=value)), tmp_path)
    returns(replace(quickstart(), objective=ALGORITHMS["grpo"](dynamic_sampling=value)), tmp_path)


WORDS = {
    "a model, and options of every type": [
        *("--model", "org/Small-1B", "--data", 'a "quoted" file.jsonl', "--micro-batch-tokens", "auto", "--packing"),
        *("--no-share-prefixes", "--softcap", "30", "--optimizer.learning-rate", "1e-6", "--lora.rank", "8"),
        *("--policy.recompute-old-logprobs", "--policy.sampling.stop", "</s>", "a\nb", "--freeze", "*.layers.[0-3].*"),
        *("--chat-template", "plain.jinja", "--mesh.shard", "2", "--policy.pass-at", "1", "8"),
    ],
    "an option without a value whose default has one": ["--reward", "a.py:right", "b=b.py:short"],
    "negative numbers in an array": [
        *("--policy.scalar.method", "tchebycheff", "--policy.scalar.ideal", "-1", "2.5"),
        *("--reward", "a=a.py:f", "b=b.py:f"),
    ],
    "arguments of the engine": ["--rollout.backend", "vllm", "--rollout.vllm.arguments", "block_size=16"],
    "a text that begins as an option does": ["--policy.sampling.stop=--seed"],
    "a class of the user's own": ["--model", "own.py:Tiny", "--tokenizer", "words", "--weights=own.safetensors"],
    "a recipe with a term": ["objective:gspo", "--objective.clip-high", "0.01", "--objective.kl.coef", "0.02"],
    "a control": ["objective:grpo", "--kl-control.kind", "linear", "--kl-control.target", "0.05"],
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_run_is_its_file(words: list[str], tmp_path):
    returns(parse(policy, words, prog="rl-fn train policy"), tmp_path)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_class_of_the_user_s_own_is_one_by_the_words_of_each_trainer(trainer: str, tmp_path):
    """A default that the words decide is made of all words that it needs."""
    words = ["--data", "rows.jsonl", "--model=own.py:Tiny", "--tokenizer", "words", "--weights", "own.safetensors"]
    config = config_of([trainer, *words], "train")[1]
    assert (config.model, config.tokenizer, config.weights) == ("own.py:Tiny", "words", Path("own.safetensors"))
    assert ":" not in config.name
    returns(config, tmp_path)


def leaves(config: Any, prefix: str = "") -> Iterator[str]:
    for option in fields(config):
        name = prefix + option.name.replace("_", "-")
        if is_dataclass(value := getattr(config, option.name)):
            yield from leaves(value, f"{name}.")
        elif option.init and not is_fixed(option):
            yield name


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_option_of_a_config_is_one_of_the_command_line(trainer: str):
    """A file has the names of the command line, which are the names of the config."""
    default = load(TRAINERS[trainer].default)
    config = default() if isinstance(default, type) else default(())
    options = options_of(config)
    assert set(leaves(config)) <= options.kinds.keys() | options.of_recipes.keys()


@pytest.mark.parametrize("algorithm", sorted(name for name in ALGORITHMS if "_" in name))
def test_a_recipe_s_name_with_underscores_is_one_behind_an_option_of_several_values(algorithm: str):
    needed = {"decoupled_ppo": ["--policy.recompute-old-logprobs"], "on_policy_distillation": ["--teacher", "a/b"]}
    words = [*needed.get(algorithm, []), "--reward", "own.py:f", f"objective:{algorithm}"]
    config = parse(policy, words, prog="rl-fn train policy")
    assert config.objective.algorithm == algorithm and config.reward == ("own.py:f",)


def test_files_lie_over_one_another_and_options_over_files(tmp_path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text('trainer = "policy"\npacking = true\n[policy]\nsteps = 3\nprompts_per_step = 5\n')
    second.write_text('policy.steps = 4\nobjective.name = "gspo"\n[objective.kl]\ncoef = 0.5\n')
    trainer, words = expanded([str(first), str(second), "--policy.prompts-per-step", "7", "--no-packing"])
    config = parse(policy, words, prog="rl-fn train policy")
    assert trainer == "policy" and config.objective.algorithm == "gspo" and config.objective.kl.coef == 0.5
    assert (config.policy.steps, config.policy.prompts_per_step, config.packing) == (4, 7, False)
    # The terms of the file are those of the algorithm that the command line names.
    config = read(first, str(second), "objective:grpo")[1]
    assert config.objective.algorithm == "grpo" and config.objective.kl.coef == 0.5


NEEDED = {
    "decoupled-ppo": ["--policy.recompute-old-logprobs"],
    "on-policy-distillation": ["--teacher", "a/b"],
    "grpo-passk": ["--policy.sampling.n", "8"],
    "passk": ["--policy.sampling.n", "8"],
}


@pytest.mark.parametrize("name", sorted(algorithms()))
def test_an_algorithm_stands_for_the_trainer_that_has_it(name: str, tmp_path, monkeypatch):
    trainer, holder = algorithms()[name]
    for word in (name, name.replace("-", "_"), name.upper()):
        # In front: an option without its value would take the recipe for it.
        assert expanded([word, "--seed", "1"]) == (trainer, [f"{holder}:{name}", "--seed", "1"])
    words = NEEDED.get(name, [])
    assert config_of([name, *words], "train") == config_of([trainer, *words, f"{holder}:{name}"], "train")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a.toml"
    file.write_text(f'trainer = "{trainer}"\nseed = 3\n')
    assert expanded([name, "a.toml"]) == (trainer, ["--seed=3", f"{holder}:{name}"])
    (tmp_path / name).mkdir()
    file.rename(tmp_path / name / RUN_FILE)
    with pytest.raises(ValueError, match=f"'{name}' is an algorithm, and here the folder of a run: write ./{name} "):
        expanded([name])
    assert expanded([f"./{name}"]) == (trainer, ["--seed=3"])


@pytest.mark.parametrize("name", ["SFT", "Policy", "reward_model", "GRPO", "dr_grpo"])
def test_the_folder_of_a_run_is_no_other_spelling_of_a_trainer_or_algorithm(name: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expanded([name])[0] in TRAINERS
    (tmp_path / name).mkdir()
    (tmp_path / name / RUN_FILE).write_text('trainer = "preference"\nseed = 3\n')
    assert expanded([name]) == ("preference", ["--seed=3"])


def test_no_algorithm_is_of_two_trainers_or_a_word_of_the_command():
    recipes = [
        recipe
        for trainer in TRAINERS.values()
        for names in options_of(load(trainer.default)()).recipes.values()
        for recipe in names
    ]
    assert sorted(recipes) == sorted(algorithms()) and len(recipes) > 50
    assert algorithms().keys().isdisjoint({*TRAINERS, *COMMANDS})


def test_a_folder_of_a_run_stands_for_its_file(tmp_path):
    config = replace(quickstart(), seed=3)
    (tmp_path / RUN_FILE).write_text(text := toml_of(config, "policy"))
    assert text.count("seed = ") == 1  # that of the run
    assert read(tmp_path) == ("policy", config)


WRONG = {
    "policy.stepz = 3": "policy.stepz: did you mean policy.steps",
    "policy.responses_per_prompt = 8": "policy.responses-per-prompt: did you mean policy.sampling.n?",
    "policy.sampling.seed = 0": "policy.sampling.seed: did you mean seed?",
    'policy.steps = "many"': "policy.steps must be a whole number, got 'many'",
    "policy.steps = true": "policy.steps must be a whole number, got True",
    "policy.steps = 1.5": "policy.steps must be a whole number, got 1.5",
    "packing = 1": "packing must be true or false, got 1",
    'dtype = "float31"': "dtype must be 'float32' or 'bfloat16', got 'float31'",
    'freeze = "a"': "freeze must be an array, each a text, got 'a'",
    "optimizer.learning-rate = 2026-01-01": "optimizer.learning-rate must be a number, got",
    'objective.name = "gsp"': "objective:gsp: did you mean objective:gspo",
    'trainer = "dpo"': 'got \'dpo\'; write trainer = "preference" and loss.name = "dpo"',
    'trainer = "GRPO"': 'got \'GRPO\'; write trainer = "policy" and objective.name = "grpo"',
    'trainer = "reward_model"': "got 'reward_model'; write trainer = \"reward-model\"",
    'trainer = ["policy"]': "trainer must be one of sft, reward-model, preference, policy, got ['policy']",
    'trainer = "dpi"': "trainer must be one of sft, reward-model, preference, policy, got 'dpi'",
    "a.b.c = 1": "there is no a.b.c",
    'policy.sampling.stop = ["a", "--b"]': "policy.sampling.stop has several texts, and '--b' begins as an option does",
    "policy.steps = 1\npolicy.steps = 2": "is no TOML: ",
    "max-turns = 1\nmax_turns = 2": "has max-turns twice",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_file_s_fault_is_named_with_the_file(text: str, tmp_path):
    file = tmp_path / "my run.toml"
    file.write_text(text if "trainer" in text else f'trainer = "policy"\n{text}\n')
    with pytest.raises(ValueError) as error:
        expanded([str(file)])
    assert str(file) in str(error.value) and WRONG[text] in str(error.value)


def test_without_a_trainer_or_with_two_the_choice_is_named(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("seed = 1\n")
    with pytest.raises(ValueError, match="has no key 'trainer': give it, one of sft"):
        expanded([str(file)])
    assert expanded(["sft", str(file)]) == ("sft", ["--seed=1"])
    file.write_text("seed = 1\n", "utf-8-sig")  # as editors of Windows write it
    assert expanded(["sft", str(file)]) == ("sft", ["--seed=1"])
    file.write_text('trainer = "policy"\n')
    with pytest.raises(ValueError, match="is of the trainer policy, not of sft"):
        expanded(["sft", str(file)])
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        expanded([str(tmp_path / "nothing.toml")])
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is no TOML"):
        expanded([str(file)])


def test_a_file_may_name_the_recipe_alone(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('trainer = "policy"\nobjective = "gspo_token"\n')
    assert read(file)[1].objective.algorithm == "gspo_token"
