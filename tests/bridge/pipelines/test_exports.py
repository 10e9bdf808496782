"""Every trainer exports what came in, and refuses before training what it could not export after it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_bridge.models import export_rehearsal
from rl_tools.cli import main

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(9)]
PAIRS = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "7+7"} for row in ROWS]
POLICY = ("--sft.steps", "0", "--policy.steps", "1", "--policy.prompts-per-step", "2")
POLICY += ("--policy.sampling.n", "2", "--policy.sampling.max-new-tokens", "3")
STEPS = {
    "sft": ("--steps", "1", "--rows-per-step", "2"),
    "preference": ("--steps", "1", "--rows-per-step", "2"),
    "reward-model": ("--steps", "1", "--rows-per-step", "2"),
    "policy": POLICY,
}
GENERATION = {"temperature": 0.6, "top_p": 0.9}
"""transformers reads these settings and refuses to write them."""


@pytest.fixture
def folder(tmp_path, model_folder):
    """The model in bfloat16, with such settings; and rows beside it."""
    folder = tmp_path / "base"
    folder.mkdir()
    for file in model_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    # Not as transformers lays it out.
    (folder / "tokenizer.json").write_text(json.dumps(json.loads((folder / "tokenizer.json").read_text())))
    for name, rows in (("rows", ROWS), ("pairs", PAIRS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(trainer, folder, *more):
    place = folder.parent
    data = place / ("rows.jsonl" if trainer in ("sft", "policy") else "pairs.jsonl")
    words = ["train", trainer, "--model", folder, "--data", data, "--held-out", 2, "--threads", 1, *STEPS[trainer]]
    return main([str(word) for word in (*words, "--output", place / "runs", "--name", "run", *more)])


@pytest.mark.parametrize("trainer", STEPS)
def test_the_exported_folder_has_the_files_and_dtypes_of_the_one_that_was_read(trainer, folder):
    assert run(trainer, folder) == 0
    model = folder.parent / "runs" / "run" / "model"
    assert {tensor.dtype for tensor in load_file(model / "model.safetensors").values()} == {torch.bfloat16}
    assert (model / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    config = json.loads((model / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and config["rope_theta"] == 10000.0
    assert json.loads((model / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    if trainer != "reward-model":  # which generates nothing
        generation = json.loads((model / "generation_config.json").read_text())
        assert {name: generation[name] for name in GENERATION} == GENERATION


@pytest.mark.parametrize("trainer", STEPS)
def test_what_cannot_be_exported_is_refused_before_there_is_a_run(trainer, folder, capsys, monkeypatch):
    def fail(tokenizer, place):
        raise OSError(f"no place for {place}/tokenizer.json")

    monkeypatch.setattr(export_rehearsal, "write_tokenizer", fail)
    assert run(trainer, folder) == 1
    message = (
        "the trained model could not be exported, as its untrained files show: no place for its folder/tokenizer.json"
    )
    assert message in capsys.readouterr().err
    assert not (folder.parent / "runs").exists()


def test_the_dtype_that_is_asked_for_is_exported(folder):
    assert run("sft", folder, "--export-dtype", "float32", "--lora.rank", "2") == 0
    model = folder.parent / "runs" / "run" / "model"
    assert {tensor.dtype for tensor in load_file(model / "model.safetensors").values()} == {torch.float32}
