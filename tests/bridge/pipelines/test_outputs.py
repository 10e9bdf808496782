"""What a finished run leaves, and what a run that cannot finish does not."""

import json
import re
from dataclasses import asdict
from importlib.metadata import entry_points
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_tools.cli import main
from rl_tools.trainers import config_of
from tests.support.results import metrics

LAST_LINE = r"held-out accuracy \d\.\d\d → \d\.\d\d in \d+ s"
QUICK = {"--sft.steps": 2, "--policy.steps": 2, "--policy.evaluate-every": 1}


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "problems.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(8) for b in range(8)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def reward(tmp_path):
    def write(body):
        path = tmp_path / "my_reward.py"
        path.write_text(f"from pathlib import Path\n\ndef score(completion, row):\n    {body}\n")
        return f"{path}:score"

    return write


def leftovers(tmp_path):
    return [path.name for path in tmp_path.rglob("*") if path.name.endswith(".tmp") or path.name == "summary.json"]


@pytest.mark.long
def test_own_data_reward_and_model_to_the_end(
    tmp_path, arguments, data, reward, model_folder, run_to_end, capsys, curves
):
    changes = {"--data": data, "--reward": reward("return float(row['answer'] in (3, 4) or '1' in completion)")}
    short = {"--optimizer.warmup": 1, "--sft.optimizer.warmup": 1}
    folder = run_to_end(arguments("run", **QUICK, **changes, **short, **{"--seed": 5}))
    out = capsys.readouterr().out.splitlines()
    assert re.fullmatch(LAST_LINE.replace("accuracy", "reward"), out[-1])
    assert out[0] == f"rows: {data}: 64 rows of 1 file: 44 trained on, 20 held out"
    assert out[1] == f"run folder: {folder}"
    assert re.fullmatch(r"held-out reward before reinforcement learning: \d\.\d{3}", out[2])

    names = {
        ".lock",
        "config.json",
        "run.toml",
        "metrics.jsonl",
        "events",
        "provenance.jsonl",
        "curves.png",
        "samples.json",
        "completions.jsonl",
        "summary.json",
        "model",
        "best",
    }
    assert {path.name for path in folder.iterdir()} == names | {"checkpoints"}
    config = json.loads((folder / "config.json").read_text())
    assert (config["data"], config["seed"], config["policy"]["steps"]) == (str(data), 5, 2)
    again = config_of([str(folder)], "train")[1]
    assert json.loads(json.dumps(asdict(again), default=str)) == config

    records = metrics(folder)
    assert [(r["stage"], r["step"]) for r in records] == [("sft", 0), ("sft", 1), ("policy", 0), ("policy", 1)]
    assert {"nll", "grad_norm", "learning_rate"} <= records[0].keys()
    assert {"reward", "held_out", "kl", "entropy", "clip_fraction", "ratio_mean", "informative"} <= records[3].keys()
    accumulator = EventAccumulator(str(folder / "events")).Reload()
    rewards = [(event.step, event.value) for event in accumulator.Scalars("policy/reward")]
    assert rewards == [(2, pytest.approx(records[2]["reward"])), (3, pytest.approx(records[3]["reward"]))]
    with Image.open(folder / "curves.png") as image:
        image.load()
        assert image.format == "PNG"
        assert len(np.unique(np.asarray(image))) > 10  # not blank

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["seed"] == 5 and summary["held_out"] == 20 and summary["seconds"] > 0
    assert {"python", "rl-fn", "jax", "torch", "transformers", "numpy"} == summary["versions"].keys()
    assert summary["versions"]["torch"] == str(torch.__version__)
    assert summary["accuracy_after"] - summary["accuracy_before"] == pytest.approx(summary["gain"]["mean"])
    assert summary["gain"]["low"] <= summary["gain"]["mean"] <= summary["gain"]["high"]
    assert "clip(ρ, 1 − 0.2, 1 + 0.28)" in summary["objective"]
    shown = f"held-out reward {summary['accuracy_before']:.2f} → {summary['accuracy_after']:.2f} in "
    assert out[-1].startswith(shown)
    samples = json.loads((folder / "samples.json").read_text())
    for when in ("before", "after"):
        for how in ("greedy", "sampled"):
            assert len(samples[when][how]) == 16
            assert samples[when][how][0].keys() == {"prompt", "completion", "answer", "reward"}

    trained = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    start = AutoModelForCausalLM.from_pretrained(model_folder)
    moved = [not torch.equal(a, b) for a, b in zip(trained.parameters(), start.parameters(), strict=True)]
    assert any(moved) and summary["parameters"] == sum(p.numel() for p in start.parameters())
    for sample in samples["after"]["greedy"][:4]:  # the saved model is the one that was evaluated
        ids = tokenizer(sample["prompt"], return_tensors="pt").input_ids
        answer = trained.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=True) == sample["completion"]


@pytest.mark.long
def test_a_run_of_the_same_name_takes_a_free_folder_and_the_same_seed_the_same_numbers(tmp_path, arguments):
    words = arguments("run", **QUICK, **{"--held-out": 4})
    assert main(words) == 0 and main(words) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run-2"}
    assert metrics(tmp_path / "run") == metrics(tmp_path / "run-2")
    other = arguments("other", **QUICK, **{"--held-out": 4, "--seed": 1})
    assert main(other) == 0
    assert metrics(tmp_path / "other") != metrics(tmp_path / "run")


@pytest.mark.long
def test_the_command_without_a_model_makes_its_own_for_the_rows(tmp_path, capsys):
    data, evaluation = tmp_path / "train.csv", tmp_path / "eval.json"
    data.write_text("prompt,answer\n" + "\n".join(f"{a}*{a}=,{a * a}" for a in range(10)))
    # Held-out rows may have characters that no row of training has.
    evaluation.write_text(json.dumps([{"prompt": "x", "answer": "y"}]))
    words = ["train", "policy", "--data", str(data), "--eval-data", str(evaluation), "--output", str(tmp_path / "runs")]
    words += ["--sft.steps", "1", "--sft.rows-per-step", "8", "--policy.steps", "1", "--policy.prompts-per-step", "2"]
    assert main([*words, "--threads", "1"]) == 0
    assert re.fullmatch(LAST_LINE, capsys.readouterr().out.splitlines()[-1])
    summary = json.loads((tmp_path / "runs" / "addition" / "summary.json").read_text())
    assert 1.0e6 < summary["parameters"] < 1.1e6 and summary["held_out"] == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / (row['answer'] - 3)", r"raised ZeroDivisionError: division by zero; completion '.*'"),
        ("return float('nan') if row['answer'] == 3 else 1.0", r"returned nan, expected a finite number; .*"),
        # In the second step of GRPO.
        (
            "return None if Path(METRICS).is_file() and '\"policy\"' in Path(METRICS).read_text() else 1.0",
            r"returned None, expected a finite number; .*",
        ),
    ],
)
def test_a_reward_that_fails_names_file_and_row_and_leaves_nothing_half_written(
    tmp_path, arguments, data, reward, capsys, body, message
):
    source = reward(body.replace("METRICS", repr(str(tmp_path / "run" / "metrics.jsonl"))))
    words = arguments("run", **QUICK, **{"--data": data, "--reward": source, "--policy.prompts-per-step": 40})
    assert main(words) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(rf"rl-fn: error: reward score on {re.escape(str(data))}, row \d+ {message}", last)
    row = json.loads(data.read_text().splitlines()[int(re.search(r"row (\d+)", last)[1]) - 1])
    assert row["answer"] == 3 or "None" in message
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "run" / "model").exists()


MISTAKES = {
    "data": ({"--data": "absent.jsonl"}, "no such file: absent.jsonl"),
    "reward": ({"--reward": "absent.py:f"}, "no such reward file: absent.py"),
    "form": ({"--reward": "absent"}, "FILE.py:function, got 'absent'"),
    "model": ({"--model": "no/such/folder/here"}, "no model can be loaded from 'no/such/folder/here'"),
    "held out": ({"--data": None, "--held-out": 9000}, "cannot hold out 9000 distinct prompts of 8100 rows"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_makes_no_folder(tmp_path, arguments, capsys, mistake):
    changes, message = MISTAKES[mistake]
    assert main(arguments("run", **changes)) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("rl-fn: error: ") and message in last
    assert list(tmp_path.iterdir()) == []


LACKING = {
    "critic": (["objective:ppo", "--critic.model", "MODEL"], None, "has no linear head|has one label"),
    "vllm": (["--rollout.backend", "vllm"], "vllm", "backend vllm needs vLLM in this environment"),
    "openenv": (["--environment", "http://127.0.0.1:9"], "openenv", "an OpenEnv server needs its client"),
}


@pytest.mark.parametrize("what", LACKING)
def test_usr_15_what_a_run_lacks_is_found_before_it_has_a_folder(tmp_path, arguments, data, model_folder, capsys, what):
    words, package, message = LACKING[what]
    if package is not None and find_spec(package) is not None:
        pytest.skip(f"{package} is here")
    given = [str(model_folder) if word == "MODEL" else word for word in words]
    assert main(arguments("run", *given, **{"--data": data, "--held-out": 2})) == 1
    assert re.search(message, capsys.readouterr().err.strip().splitlines()[-1])
    assert leftovers(tmp_path) == [] and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--softcap", "5"], "softcap and dtype bfloat16 need recompute_old_logprobs=True"),
        (["--dtype", "bfloat16"], "softcap and dtype bfloat16 need recompute_old_logprobs=True"),
        (["--micro-batch-tokens", "0"], "micro_batch_tokens > 0"),
        (["--policy.sampling.n", "1"], "a group needs --policy.sampling.n ≥ 2"),
        (["--policy.sampling.n", "4", "objective:passk"], "k=4 completions, and --policy.sampling.n=4 has one set"),
        (
            ["--policy.sampling.n", "3", "objective:passk"],
            "n=3 has none, without an advantage: take --policy.sampling.n",
        ),
        (["objective:on_policy_distillation"], "on_policy_distillation learns from a teacher: give --teacher MODEL"),
        (["--policy.critic-warmup", "1"], "critic_warmup=1: dapo has no critic"),
        (["--objective.aggregation.mode", "prompt-mean"], "prompt-mean cannot be trained with"),
        (["--kl-control.target", "0.1"], "KL control has options and no kind"),
        (["--objective.kl.estimator", "k1"], "the objective has no KL penalty: give --objective.kl.coef"),
        (["--objective.kl.place", "reward"], "no KL penalty to take off the reward: give --objective.kl.coef"),
        (["--policy.stepz", "1"], "policy.stepz"),
        (["--policy.steps", "many"], "many"),
    ],
)
def test_options_are_checked_before_anything_runs(arguments, tmp_path, capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        main(arguments("run", *words))
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert message in re.sub(r"[│\s]+", " ", printed.err + printed.out)
    assert list(tmp_path.iterdir()) == []


def test_the_command_itself(capsys):
    [command] = entry_points(group="console_scripts", name="rl-fn")
    assert command.load() is main
    assert main([]) == main(["--help"]) == main(["-h"]) == 0
    assert capsys.readouterr().out.count("usage: rl-fn train {") == 3
    assert main(["train", "everything"]) == 2
    assert "'everything' is no trainer (sft, " in capsys.readouterr().err
