"""USR-4: whatever a run reads and that lies in a file is compared on --resume, by its content."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rl_bridge.algorithms.policy_setup import PolicyConfig
from rl_bridge.common.user_marks import content_of, sources_of
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.loop.data import Model
from rl_bridge.models.model_source import PretrainedSource, ValueSource
from rl_bridge.models.pretrained import tokenizer_of
from rl_bridge.models.small import character_tokenizer
from rl_bridge.pipelines.objective_options import objective_options
from rl_bridge.pipelines.rollout_options import RolloutOptions
from rl_bridge.run.provenance import of_folder
from rl_tools.cli import main
from rl_train.policy import run_policy
from rl_train.policy_configs import quickstart
from rl_train.policy_inputs import value_source
from rl_train.policy_options import CriticOptions, PolicyPipeline
from rl_train.preference import PreferencePipeline, run_preference
from rl_train.sft import SFTPipeline, run_sft
from tests.support.own_models import Bigram, tokenizer

REWARD = "import helper\n\ndef score(completion, row):\n    from package.inner import half\n    return half(row)\n"
PLAY = "def interact(messages):\n    import rules\n    return [][: rules.TURNS]\n"
OWN_CLASS = """
from tests.support.own_models import Bigram

PLACE = 2 + 0


def small():
    return Bigram()
"""
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "_hint": n} for n in range(6)]


@pytest.fixture
def inputs(tmp_path, model_folder):
    """A folder with every kind of file that a run reads."""
    for name in ("base", "judge", "critic"):
        shutil.copytree(model_folder, tmp_path / name)
    value = ValueSource(PretrainedSource(str(model_folder)), seed=1)
    with torch.device("meta"):
        model = value.empty()
    value.load(model)
    for name in ("judge", "critic"):
        model.save_pretrained(tmp_path / name)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "helper.py").write_text("A = 1\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "inner.py").write_text(
        "from . import beside\n\ndef half(row):\n    return row['_hint'] / 2\n"
    )
    (tmp_path / "package" / "beside.py").write_text("B = 1\n")
    (tmp_path / "game.py").write_text(PLAY)
    (tmp_path / "rules.py").write_text("TURNS = 1\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]))
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "7"} for row in ROWS]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return tmp_path


def bit(file):
    """The least change of the last number of the weights."""
    content = bytearray(file.read_bytes())
    content[-4] ^= 1
    file.write_bytes(content)


def text(before, after):
    return lambda file: file.write_text(file.read_text().replace(before, after))


POLICY = {
    "base/chat_template.jinja": (lambda file: file.write_text("{{ messages }}"), "model"),
    "judge/model.safetensors": (bit, "reward"),
    "critic/model.safetensors": (bit, "critic's model"),
    "package/beside.py": (text("1", "2"), "reward"),
    "rules.py": (text("1", "2"), "environment"),
    "eval.jsonl": (text('"_hint": 1', '"_hint": 9'), "data"),
}
OWN = {
    "own.py": (text("2 + 0", "2 * 1"), "model"),
    "own.safetensors": (bit, "weights"),
    "words/tokenizer.json": (text('"9"', '"*"'), "tokenizer"),
    "reading.py": (text("PLACE = 1", "PLACE = 2"), "data reader"),
    "holding.py": (text("PLACE = 1", "PLACE = 2"), "held-out rows' reader"),
}
PREFERENCE = {
    "base/model.safetensors": (bit, "model"),
    "pairs.jsonl": (text('"7"', '"8"'), "data"),
}


def every_change_is_refused(run, pipeline, folder, changes):
    run(pipeline)
    again = replace(pipeline, resume=True)
    for place, (change, name) in changes.items():
        file = folder / place
        before = file.read_bytes() if file.exists() else None
        change(file)
        with pytest.raises(ValueError, match=f"the {name} is another one") as refused:
            run(again)
        assert str(refused.value).count("another one") == 1, place
        file.unlink() if before is None else file.write_bytes(before)
    run(again)


@pytest.mark.long
def test_policy(inputs):
    pipeline = PolicyPipeline(
        name="run",
        output=inputs / "runs",
        model=str(inputs / "base"),
        data=str(inputs / "rows.jsonl"),
        eval_data=str(inputs / "eval.jsonl"),
        reward=(f"mine={inputs / 'reward.py'}:score", f"learned=model:{inputs / 'judge'}"),
        environment=f"{inputs / 'game.py'}:interact",
        objective=objective_options("ppo"),
        critic=CriticOptions(model=str(inputs / "critic")),
        policy=PolicyConfig(steps=1, prompts_per_step=2, sampling=SamplingParams(n=2, max_new_tokens=2)),
    )
    every_change_is_refused(run_policy, pipeline, inputs, POLICY)


def test_usr_7_a_reward_that_changes_the_working_directory_moves_nothing(inputs, monkeypatch):
    """At its trial, and at every call of the run."""
    (inputs / "there").mkdir()
    there = str(inputs / "there")
    (inputs / "moves.py").write_text(f"import os\n\ndef f(completion, row):\n    os.chdir({there!r})\n    return 1.0\n")
    monkeypatch.chdir(inputs)
    sampling = SamplingParams(n=2, max_new_tokens=2)
    run_policy(
        PolicyPipeline(
            name="run",
            output=Path("runs"),
            model="base",
            data="rows.jsonl",
            eval_data="eval.jsonl",
            reward=("moves.py:f",),
            policy=PolicyConfig(steps=2, prompts_per_step=2, sampling=sampling),
            checkpoint_every=1,
        )
    )
    assert not any((inputs / "there").iterdir()) and not any(path.name == "there" for path in inputs.glob("*/*"))
    folder = inputs / "runs" / "run"
    assert (folder / "model" / "model.safetensors").is_file() and len(list((folder / "checkpoints").iterdir())) == 2


@pytest.mark.long
def test_preference(inputs):
    pipeline = PreferencePipeline(
        output=inputs / "runs",
        model=str(inputs / "base"),
        data=str(inputs / "pairs.jsonl"),
        held_out=2,
        steps=1,
        rows_per_step=2,
    )
    every_change_is_refused(run_preference, pipeline, inputs, PREFERENCE)


@pytest.mark.long
def test_a_model_class_its_weights_its_tokenizer_and_the_readers(inputs):
    """A class of the user's own trains by the command, and what it exports is read by it again."""
    (inputs / "own.py").write_text(OWN_CLASS)
    tokenizer().save_pretrained(inputs / "words")
    save_file(Bigram().state_dict(), inputs / "own.safetensors")
    for name in ("reading", "holding"):
        rows = f"PLACE = 1\n\n\ndef rows():\n    yield from {ROWS!r}\n"
        (inputs / f"{name}.py").write_text(rows)
    pipeline = SFTPipeline(
        output=inputs / "runs",
        model=f"{inputs / 'own.py'}:small",
        tokenizer=str(inputs / "words"),
        weights=inputs / "own.safetensors",
        data=f"{inputs / 'reading.py'}:rows",
        eval_data=f"{inputs / 'holding.py'}:rows",
        steps=1,
        rows_per_step=2,
    )
    every_change_is_refused(run_sft, pipeline, inputs, OWN)


def test_a_model_class_is_trained_by_the_words_of_the_policy_command(inputs):
    (inputs / "own.py").write_text(OWN_CLASS)
    tokenizer().save_pretrained(inputs / "words")
    save_file(Bigram().state_dict(), inputs / "own.safetensors")
    words = {
        "--model": f"{inputs / 'own.py'}:small", "--tokenizer": inputs / "words",
        "--weights": inputs / "own.safetensors", "--reward": f"{inputs / 'reward.py'}:score",
        "--data": inputs / "rows.jsonl", "--eval-data": inputs / "eval.jsonl", "--output": inputs / "runs",
        "--policy.steps": 1, "--policy.prompts-per-step": 2, "--policy.sampling.n": 2,
        "--policy.sampling.max-new-tokens": 2,
    }  # fmt: skip
    assert main(["train", "policy", *(str(word) for option in words.items() for word in option)]) in (0, None)
    assert (inputs / "runs" / "small-rows" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "options",
    [
        {"model": "own.py:Tiny"},
        {"model": "base", "tokenizer": "base"},
        {"tokenizer": "base"},
        {"model": "base", "weights": Path("tiny.safetensors")},
    ],
    ids=str,
)
def test_tokenizer_and_weights_are_a_class_s(options):
    with pytest.raises(ValueError, match=r"a model class of your own is --model FILE\.py:Class with --tokenizer"):
        replace(quickstart(), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rollout": RolloutOptions(backend="vllm")}, r"vLLM has no model own\.py:Tiny, a class of your own"),
        ({"rollout": RolloutOptions(precision="int8")}, r"own\.py:Tiny is a class of your own: which of its layers"),
        ({"objective": objective_options("ppo")}, r"has a critic, whose trunk .* give --critic\.model FOLDER"),
    ],
    ids=str,
)
def test_what_a_class_cannot_do_is_refused_before_anything_is_read(options, words):
    policy = replace(quickstart().policy, recompute_old_logprobs=True)
    with pytest.raises(ValueError, match=words):
        replace(quickstart(), model="own.py:Tiny", tokenizer="words", policy=policy, **options)


def test_a_critic_reads_the_policy_s_ids(inputs, model_folder, tmp_path, capsys):
    """Of another vocabulary its values would be of other tokens; without a tokenizer nobody knows."""
    policy = Model(PretrainedSource(str(model_folder)), tokenizer_of(str(model_folder)))
    assert value_source(str(inputs / "critic"), policy) is not None and capsys.readouterr().out == ""
    character_tokenizer("=-+9876543210").save_pretrained(inputs / "critic")
    with pytest.raises(ValueError, match=r"the critic .* has another vocabulary than the policy: it has no token"):
        value_source(str(inputs / "critic"), policy)
    for file in (inputs / "critic").glob("*token*"):
        file.unlink()
    assert value_source(str(inputs / "critic"), policy) is not None
    assert "has no tokenizer to compare" in capsys.readouterr().out


def test_every_model_of_a_policy_run_is_compared(model_folder):
    """The teacher needs an objective of its own, so the run above has none."""
    critic = replace(quickstart(), model="a", critic=CriticOptions(model="c"), objective=objective_options("ppo"))
    assert critic.models() == {"model": "a", "teacher": None, "critic's model": "c"}
    distilled = objective_options("on_policy_distillation")
    run = replace(quickstart(), objective=distilled, teacher=str(model_folder))
    assert run.fingerprints() == {"teacher": of_folder(model_folder)}


def test_every_file_of_a_model_counts_and_only_its_place_does_not(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    before = of_folder(folder)
    assert before == of_folder(model_folder)
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert of_folder(folder) != before, file.name
        file.write_bytes(content)
        assert of_folder(folder) == before
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    assert of_folder(folder) != before


def test_imports_are_followed_and_installed_packages_are_not(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "shared.py").write_text("import mine\n")
    (tmp_path / "space").mkdir()
    (tmp_path / "space" / "leaf.py").write_text("")
    (tmp_path / "mine.py").write_text(
        "import os, torch, rl_bridge.rewards, shared\nfrom space import leaf\nimport absent\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    files = {path.relative_to(tmp_path).as_posix() for path in sources_of(tmp_path / "mine.py")}
    assert files == {"mine.py", "elsewhere/shared.py", "space/leaf.py"}
    before = content_of(tmp_path / "mine.py")
    (tmp_path / "space" / "leaf.py").write_text("A = 1\n")
    assert content_of(tmp_path / "mine.py") != before
