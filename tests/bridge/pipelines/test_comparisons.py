"""Policies and reward models from comparisons, by their commands: from a file of rows to a folder of results."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Lfm2Config,
    Lfm2ForCausalLM,
)

import rl_fn
from rl_bridge.data.trajectory import single_turn
from rl_bridge.models.pretrained import save_pretrained
from rl_bridge.models.small import character_tokenizer, tiny_qwen2
from rl_bridge.modules.comparison import PREFERENCE_LOSSES, REWARD_LOSSES, constants_of
from rl_bridge.rewards import load
from rl_bridge.run.run import Run
from rl_tools.cli import main
from rl_train.compared import LOSSES, REWARD_MODEL_LOSSES, loss_options
from rl_train.preference import PreferencePipeline
from tests.support.chat_templates import bytes_tokenizer
from tests.support.results import metrics

ROOT = Path(__file__).parents[3]
SUMS = [(a, b) for a in range(4) for b in range(5)]
ROWS = {
    "pairs": [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"-{a + b}"} for a, b in SUMS],
    "triples": [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1), "gold": str(a + b)} for a, b in SUMS
    ],
    "singles": [{"prompt": f"{a}+{b}=", "completion": str(a + b + b % 2), "label": b % 2 == 0} for a, b in SUMS],
    "ranking": [
        {"prompt": f"{a}+{b}=", "completions": ["-" * d + str(a + b) for d in range(2 + b % 2)]} for a, b in SUMS
    ],
}
COMMON = {"--held-out": 6, "--threads": 1, "--checkpoint-every": 2, "--optimizer.warmup": 0}


@pytest.fixture
def words(tmp_path, model_folder):
    """The words of a command of three steps on rows of a form."""

    def of(trainer, form, name, *more, **changes):
        data = tmp_path / f"{form}.jsonl"
        data.write_text("\n".join(map(json.dumps, ROWS[form])))
        steps = {"--steps": 3, "--rows-per-step": 5, "--evaluate-every": 2}
        options = {**COMMON, **steps, "--data": data, "--model": model_folder, "--output": tmp_path, "--name": name}
        options |= {"--optimizer.learning-rate": 0.01, **changes}
        loss = [word for word in more if word.startswith("loss:")]
        rest = [word for word in more if word not in loss]
        return ["train", trainer, *loss, *(str(word) for pair in options.items() for word in pair), *rest]

    return of


@pytest.mark.long
def test_a_policy_learns_from_pairs_and_the_reference_is_scored_once_or_at_each_step(words, run_to_end, capsys):
    folder = run_to_end(words("preference", "pairs", "cached", "loss:dpo", "--loss.beta", "0.5"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"held-out accuracy \d\.\d\d \(95 % interval \d\.\d\d … \d\.\d\d\) in \d+ s", last)
    records = metrics(folder)
    assert [(r["stage"], r["step"]) for r in records] == [("preference", step) for step in range(3)]
    # Before its first update the policy is its reference.
    assert records[0]["loss"] == pytest.approx(0.693147, rel=1e-5) and abs(records[1]["margin"]) > 1e-3
    assert {"chosen_reward", "margin", "accuracy", "grad_norm"} <= records[0].keys()
    assert {"held_out_loss", "held_out_accuracy_low"} <= records[1].keys() - records[0].keys()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["loss"]["name"], summary["loss"]["beta"]) == ("dpo", 0.5)
    assert (summary["rows"], summary["held_out"]) == (14, 6)
    assert summary["before"]["held_out_loss"] == pytest.approx(0.693147, rel=1e-5)
    assert summary["after"]["held_out_loss"] == records[2]["held_out_loss"]
    AutoModelForCausalLM.from_pretrained(folder / "model")

    again = run_to_end(words("preference", "pairs", "each", "loss:dpo", "--loss.beta", "0.5", "--no-cache-reference"))
    for one, other in zip(records, metrics(again), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


@pytest.mark.parametrize(("name", "form"), [("tpo", "triples"), ("aot-unpaired", "singles")])
def test_other_forms_of_rows(words, run_to_end, name, form):
    folder = run_to_end(words("preference", form, "run", f"loss:{name}"))
    assert all(record["grad_norm"] > 1e-6 for record in metrics(folder))


@pytest.mark.long
@pytest.mark.parametrize("name", ["kto", "bco"])
def test_single_completions_and_a_resumed_run(words, tmp_path, run_to_end, monkeypatch, name):
    whole = run_to_end(words("preference", "singles", "whole", f"loss:{name}"))
    assert all(abs(record["grad_norm"]) > 1e-6 for record in metrics(whole))
    # Stopped behind the checkpoint of its second step, and taken up again.
    write, logged = Run.log, []

    def log(run, step, *arguments, **options):
        write(run, step, *arguments, **options)
        logged.append(step)
        if len(logged) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "log", log)
    command = words("preference", "singles", "stopped", f"loss:{name}")
    assert main(command) == 130
    monkeypatch.undo()
    assert main([*command, "--resume"]) == 0
    numbers = [{k: v for k, v in r.items() if k in ("loss", "grad_norm", "kl", "delta")} for r in metrics(whole)]
    assert [{k: r[k] for k in n} for r, n in zip(metrics(tmp_path / "stopped"), numbers, strict=True)] == numbers
    weights = [
        AutoModelForCausalLM.from_pretrained(tmp_path / run / "model").state_dict() for run in ("whole", "stopped")
    ]
    assert all(torch.equal(weights[1][key], value) for key, value in weights[0].items())


@pytest.mark.parametrize(
    ("loss", "form", "more"), [("bradley-terry", "pairs", ("--lora.rank", "2")), ("plackett-luce", "ranking", ())]
)
def test_a_reward_model_learns_and_is_read_by_transformers(words, run_to_end, loss, form, more):
    folder = run_to_end(words("reward-model", form, "rewards", f"loss:{loss}", *more))
    losses = [record["loss"] for record in metrics(folder)]
    assert losses[2] < losses[0]
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    assert model.config.num_labels == 1 and model.score.weight.abs().max() > 1e-4


@pytest.mark.long
@pytest.mark.parametrize("rows", ["conversations", "texts"])
def test_the_exported_folder_gives_the_run_s_own_loss_in_plain_transformers(words, run_to_end, tmp_path, rows):
    """USR-3, MUS-1: a tokenizer that pads with the end of a turn; rows as its template renders them, or plain texts."""
    source = bytes_tokenizer("chatml")
    source.pad_token = source.eos_token
    save_pretrained(tmp_path / "base", tiny_qwen2(source, hidden=16, layers=1, heads=2), source)
    asked = [{"role": "user", "content": f"{a}+{b}?"} for a, b in SUMS]
    chats = [
        {
            "prompt": [message] if rows == "conversations" else message["content"],
            "chosen": str(a + b),
            "rejected": f"{a + b + 1} the",
        }
        for message, (a, b) in zip(asked, SUMS, strict=True)
    ]
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("\n".join(map(json.dumps, chats[:6])))
    changes = {
        "--model": tmp_path / "base",
        "--eval-data": held_out,
        "--held-out": 200,
        "--optimizer.learning-rate": 0.05,
    }
    command = words("reward-model", "pairs", "rewards", "loss:bradley-terry", **changes)
    Path(command[command.index("--data") + 1]).write_text("\n".join(map(json.dumps, chats)))
    folder = run_to_end(command)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    said = [
        [message, {"role": "assistant", "content": row[side]}]
        for message, row in zip(asked[:6], chats, strict=False)
        for side in ("chosen", "rejected")
    ]
    if rows == "conversations":
        texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in said]
    else:
        assert tokenizer.chat_template is None
        texts = ["".join(message["content"] for message in messages) + tokenizer.eos_token for messages in said]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        rewards = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, 0].view(-1, 2)
        alone = [model(input_ids=tokenizer(text, return_tensors="pt").input_ids).logits for text in texts]
    torch.testing.assert_close(torch.cat(alone).view(-1, 2), rewards, rtol=0, atol=1e-5)
    loss = -torch.nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1]).mean()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["best_loss"] == pytest.approx(float(loss), abs=1e-5)
    assert abs(float(loss) - 0.693147) > 1e-3
    read = [
        replace(single_turn([3], [4], messages=tuple(m)), row=row) for row, m in zip(chats, said[::2], strict=False)
    ]
    found = [float(t.rewards["reward"]) for t in load(f"model:{folder / 'model'}").score(read)]
    torch.testing.assert_close(torch.tensor(found), rewards[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("trainer", "form", "loss", "message"),
    [
        ("preference", "singles", "dpo", r"singles\.jsonl, row \d+: dpo learns from chosen and rejected"),
        ("preference", "pairs", "tpo", r"pairs\.jsonl, row \d+: tpo needs a third completion: field 'gold'"),
        ("reward-model", "singles", "bradley-terry", r"row \d+: bradley_terry learns from chosen and rejected"),
    ],
)
def test_rows_that_do_not_fit_are_named(words, capsys, trainer, form, loss, message):
    assert main(words(trainer, form, "run", f"loss:{loss}")) == 1
    assert re.search(message, capsys.readouterr().err)


def test_a_reference_that_would_take_turns_within_a_step_is_refused():
    with pytest.raises(ValueError, match="offload phases needs cache_reference"):
        PreferencePipeline(offload="phases", cache_reference=False)


def test_every_loss_is_an_option_with_the_constants_of_its_function():
    assert tuple(LOSSES) == PREFERENCE_LOSSES and tuple(REWARD_MODEL_LOSSES) == REWARD_LOSSES
    for name in (*PREFERENCE_LOSSES, *REWARD_LOSSES):
        loss = loss_options(name).build()
        assert (loss.name, loss.constants) == (name, constants_of(name))
        assert getattr(rl_fn, name).__doc__.startswith((loss_options(name).__doc__ or "?").partition("\n")[0])
    assert loss_options("ipo", average=True, beta=0.3).build().average
    with pytest.raises(ValueError, match="unknown loss 'ppo'"):
        loss_options("ppo")


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["torchrun", "ray"])
@pytest.mark.parametrize(
    ("trainer", "form", "loss"),
    [("preference", "singles", "kto"), ("preference", "pairs", "aot"), ("reward-model", "ranking", "plackett-luce")],
)
def test_two_workers_end_as_one_process_does(words, run_to_end, tmp_path, executor, trainer, form, loss):
    if executor == "ray":
        pytest.importorskip("ray")
    one = metrics(run_to_end(words(trainer, form, "one", f"loss:{loss}")))
    more = ("--executor", "ray", "--workers", "2") if executor == "ray" else ()
    launch = [] if executor == "ray" else ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    command = [sys.executable, *launch, "-m", "rl_tools.cli", *words(trainer, form, "two", f"loss:{loss}", *more)]
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "bridge"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    two = metrics(tmp_path / "two")
    assert len(one) == len(two) == 3
    for a, b in zip(one, two, strict=True):
        numbers = [name for name in a if "loss" in name or name in ("grad_norm", "margin", "kl", "held_out_accuracy")]
        assert len(numbers) >= 2
        assert [b[name] for name in numbers] == pytest.approx([a[name] for name in numbers], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("trainer", ["preference", "reward-model"])
def test_rows_that_are_longer_than_the_positions_are_refused_before_training(
    words, model_folder, tmp_path, trainer, capsys
):
    short = tmp_path / "short"
    shutil.copytree(model_folder, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 5}))
    assert main(words(trainer, "pairs", "never", **{"--model": short})) == 1
    # "0+0=-0" and the end-of-sequence token.
    assert re.search(r"pairs\.jsonl, row \d+: the row has 7 tokens; the model has 5 positions", capsys.readouterr().err)
    assert not (tmp_path / "never").exists()


def test_a_hybrid_begins_as_its_reference_and_the_record_says_that_rows_are_padded(words, run_to_end, tmp_path):
    """ENG-1: by default the loss of a tiny LFM2 began at 0.69121 and its margin at 0.011."""
    tokenizer = character_tokenizer("0123456789+-=")
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
        initializer_range=0.5,
    )
    save_pretrained(tmp_path / "lfm2", Lfm2ForCausalLM(config), tokenizer)
    changes = {"--model": tmp_path / "lfm2", "--steps": 1}
    folder = run_to_end(words("preference", "pairs", "hybrid", "loss:dpo", **changes))
    (record,) = [line for line in metrics(folder) if "stage" in line]
    assert record["loss"] == pytest.approx(0.693147, rel=1e-5) and record["margin"] == pytest.approx(0, abs=1e-5)
    (note,) = json.loads((folder / "summary.json").read_text())["notes"]
    assert note.startswith("Lfm2ForCausalLM: each row has its own prefix, since shared rows would give other numbers")
    assert note in [json.loads(line).get("note") for line in (folder / "metrics.jsonl").read_text().splitlines()]
