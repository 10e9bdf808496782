"""Supervised fine-tuning from the command line: rows, loss, evaluation, best model, adapters, two ranks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_bridge.models.pretrained import save_pretrained
from rl_bridge.models.small import character_tokenizer, tiny_qwen2
from rl_tools.cli import main
from tests.support.results import metrics

ROOT = Path(__file__).parents[3]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    "{{ 'a' if add_generation_prompt }}"
)
OPTIONS = {
    "--steps": 6,
    "--rows-per-step": 8,
    "--evaluate-every": 2,
    "--held-out": 6,
    "--optimizer.learning-rate": 0.01,
    "--optimizer.warmup": 0,
    "--threads": 1,
    "--seed": 3,
}


def conversation(a, b):
    turns = [("user", f"{a}+{b}"), ("assistant", str(a + b)), ("user", "+1"), ("assistant", str(a + b + 1))]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "chat"
    tokenizer = character_tokenizer("0123456789+aus")
    tokenizer.chat_template = TEMPLATE
    save_pretrained(folder, tiny_qwen2(tokenizer, hidden=16, layers=2, heads=2), tokenizer)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(conversation(a, b)) + "\n" for a in range(8) for b in range(0, 60, 12)))
    return path


@pytest.fixture
def words(tmp_path, chat_model, rows):
    def of(name, *more, **changes):
        options = {"--output": tmp_path, "--model": chat_model, "--data": rows, **OPTIONS, "--name": name, **changes}
        return ["train", "sft", *(str(word) for pair in options.items() for word in pair), *map(str, more)]

    return of


def ended(words):
    assert main(words) == 0
    return Path(words[words.index("--output") + 1]) / words[words.index("--name") + 1]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def by_hand(folder, row):
    """Mean negative log-likelihood of the assistant's turns, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids, labels = [], []
    for message in row["messages"]:
        said = message["role"] == "assistant"
        # The template writes the role's first letter; what follows is the assistant's, with its end.
        text = tokenizer(message["content"]).input_ids + [tokenizer.eos_token_id] * said
        letter = tokenizer(message["role"][0]).input_ids
        ids += letter + text
        labels += [-100] + (text if said else [-100] * len(text))
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss)


def test_a_run_lowers_the_loss_and_exports_its_best_model(words, tmp_path, rows):
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps(conversation(9, 3)) + "\n")
    folder = ended(words("run", **{"--eval-data": held, "--held-out": 100, "--steps": 7}))
    log, found = metrics(folder), summary(folder)
    assert [line["step"] for line in log if "held_out_nll" in line] == [1, 3, 5, 6]
    measured = [line["held_out_nll"] for line in log if "held_out_nll" in line]
    assert found["nll_best"] == min(measured) and found["nll_after"] == pytest.approx(measured[-1], rel=1e-6)
    assert found["nll_best"] < 0.85 * found["nll_before"]
    assert by_hand(folder / "model", conversation(9, 3)) == pytest.approx(found["nll_best"], rel=1e-4)
    assert (found["rows"], found["held_out"], found["left_out"], found["steps"]) == (40, 1, 0, 7)


@pytest.mark.long
def test_a_resumed_run_ends_as_one_that_was_not_stopped(words, tmp_path):
    whole = ended(words("whole", **{"--checkpoint-every": 2}))
    stopped = words("stopped", **{"--checkpoint-every": 2, "--stop-after-skips": 3})
    from rl_bridge.modules import trainable

    update, calls = trainable.Trainable.optimizer_step, []

    def dying(self):
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("the power is gone")
        return update(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainable.Trainable, "optimizer_step", dying)
        assert main(stopped) == 1
    folder = ended([*stopped, "--resume"])
    timeless = [
        [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in metrics(run)]
        for run in (whole, folder)
    ]
    assert timeless[0] == timeless[1]
    a, b = (load_file(run / "model" / "model.safetensors") for run in (whole, folder))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_adapters_are_trained_and_exported_merged(words, chat_model):
    pytest.importorskip("peft")
    folder = ended(words("lora", "--lora.rank", 4, **{"--optimizer.learning-rate": 0.05}))
    found = summary(folder)
    assert found["trained_parameters"] < 0.5 * found["parameters"]
    assert found["nll_best"] < found["nll_before"]
    merged, base = (load_file(path / "model.safetensors") for path in (folder / "model", chat_model))
    assert merged.keys() == base.keys()
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {name for name in base if "_proj.weight" in name}
    assert AutoModelForCausalLM.from_pretrained(folder / "model").config.architectures == ["Qwen2ForCausalLM"]


@pytest.mark.long
def test_frozen_parameters_and_recomputed_layers(words, chat_model):
    plain = ended(words("plain", "--freeze", "model.embed_tokens.*", "*.layers.0.*"))
    other = ended(
        words("other", "--freeze", "model.embed_tokens.*", "*.layers.0.*", "--gradient-checkpointing", "--packing")
    )
    trained, base = (load_file(path / "model.safetensors") for path in (plain / "model", chat_model))
    same = {name for name in base if torch.equal(base[name], trained[name])}
    assert same == {name for name in base if "embed_tokens" in name or ".layers.0." in name}
    for a, b in zip(metrics(plain), metrics(other), strict=True):
        assert b["nll"] == pytest.approx(a["nll"], rel=1e-5)
    assert main(words("never", "--freeze", "*.layer.0.*")) == 1


@pytest.mark.long
def test_weights_in_host_memory_change_nothing(words):
    plain, other = ended(words("plain")), ended(words("other", "--offload", "always"))
    for a, b in zip(metrics(plain), metrics(other), strict=True):
        assert b["nll"] == pytest.approx(a["nll"], rel=1e-5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--freeze", "model.embed_token.weight"), "near names are model.embed_tokens.weight"),
        (("--freeze", "*"), "leave no parameter to train"),
        (("--max-length", 3), "all of 34 rows are longer than max_length 3"),
        (("--steps", 0), "counts must be ≥ 1, got steps=0"),
        (("--rows-per-step", 0), "counts must be ≥ 1, got steps=6, rows_per_step=0"),
        (("--lora.alpha", 3.0), "--lora.alpha 3.0 has no effect without a --lora.rank of at least 1"),
        (("--epochs", 0.0), "need epochs > 0"),
        (("--offload", "never"), "invalid choice"),
        (("--held-out", 0), "held_out must be at least 1, got 0"),
    ],
)
def test_options_that_cannot_be_are_refused(words, capsys, more, message):
    option, value = more
    try:
        status = main(words("never", **{option: value}))
    except SystemExit as end:
        status = end.code
    assert status in (1, 2)
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_epochs_and_lengths(words):
    few = {"--steps": 200, "--rows-per-step": 4}
    folder = ended(words("epochs", "--epochs", 1.5, "--max-length", 15, **few))
    found = summary(folder)
    # 34 rows are left to train on; a conversation of two digits in the first number is longer than 15 tokens.
    assert found["left_out"] > 0 and found["rows"] + found["left_out"] + found["held_out"] == 40
    note, *records = metrics(folder)
    left_out = f"{found['left_out']} of 40 rows are left out: they have more than 15 tokens (--max-length)"
    assert note["note"].endswith(left_out)
    assert found["steps"] == -(-3 * found["rows"] // 8) == len(records)


def test_contents_can_be_concatenated(words):
    found = summary(ended(words("plain", "--no-apply-chat-template")))
    assert found["nll_best"] < found["nll_before"]


@pytest.mark.slow  # tests/bridge/invariance runs the same pipeline on two ranks
def test_two_ranks_of_torchrun_end_as_one_process_does(words, tmp_path):
    one = ended(words("one", "--micro-batch-tokens", 64))
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "bridge"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    command = [*launch, "-m", "rl_tools.cli", *words("two", "--micro-batch-tokens", 64)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]
    assert_same_run(tmp_path / "two", one)


@pytest.mark.slow
@pytest.mark.ray
def test_ray_does_too(words, tmp_path):
    one = ended(words("one"))
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "bridge"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "rl_tools.cli", *words("two", "--executor", "ray", "--workers", 2)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]
    assert_same_run(tmp_path / "two", one)


def assert_same_run(folder, wanted):
    """Metrics and weights to float32 rounding."""
    found, expected = metrics(folder), metrics(wanted)
    assert len(found) == len(expected) == 6
    for a, b in zip(found, expected, strict=True):
        numbers = [key for key in b if key not in ("stage", "seconds", "tokens_per_second")]
        assert a.keys() == b.keys()
        assert [a[key] for key in numbers] == pytest.approx([b[key] for key in numbers], rel=2e-5), a["step"]
    weights = [load_file(path / "model" / "model.safetensors") for path in (folder, wanted)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[1].items():
        torch.testing.assert_close(weights[0][name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_a_chat_template_of_a_file_is_used_exported_and_compared(tmp_path, words, chat_model, capsys):
    plain, file = tmp_path / "plain", tmp_path / "template.jinja"
    shutil.copytree(chat_model, plain)
    (plain / "chat_template.jinja").unlink()
    assert main(words("none", **{"--model": plain})) == 1
    assert "--chat-template FILE gives it one" in capsys.readouterr().err
    file.write_text(TEMPLATE)
    options = {"--model": plain, "--chat-template": file, "--steps": 2, "--checkpoint-every": 1}
    given = ended(words("given", **options))
    own = ended(words("own", **{"--steps": 2}))
    assert [record["nll"] for record in metrics(given)] == [record["nll"] for record in metrics(own)]
    assert AutoTokenizer.from_pretrained(given / "model").chat_template == TEMPLATE
    # A file that was moved is the same; another text is not.
    elsewhere = file.rename(tmp_path / "moved.jinja")
    assert main(words("given", "--resume", **options | {"--chat-template": elsewhere})) == 0
    elsewhere.write_text("{# the same ids #}" + TEMPLATE)
    assert main(words("given", "--resume", **options | {"--chat-template": elsewhere})) == 1
    assert "the chat template is another one" in capsys.readouterr().err
