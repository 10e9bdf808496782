"""rl-fn quantize, as it is typed."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

from rl_bridge.models.compressed_tensors import write_checkpoint
from rl_bridge.models.model_source import PretrainedSource
from rl_bridge.rollout.inside_vllm.flashrl import settings_of
from rl_bridge.weights.source import LAYOUTS
from rl_tools import doctor
from rl_tools.cli import main
from rl_tools.quantize import parser, read_prompts, weight_errors


@pytest.fixture
def command(capsys):
    def run(*words):
        status = main(["quantize", *map(str, words)])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


@pytest.fixture
def folder(new_model, tokenizer, tmp_path):
    new_model(seed=2).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_setup_writes_what_the_variable_reads(command, tmp_path):
    path = tmp_path / "new" / "config.yaml"
    status, out, _ = command("setup", "--fn", "int8", "-o", path)
    assert status == 0
    assert f"1 data-parallel ranks in turn; export FLASHRL_CONFIG={path}" in out
    command("setup", "--fn", "fp8_channel", "-m", "m", "-o", path, "--append", "load_format=auto")
    assert yaml.safe_load(path.read_text())["configs"][1]["load_format"] == "auto"
    settings = settings_of({"FLASHRL_CONFIG": str(path)})
    assert [setting.precision for setting in settings.ranks] == ["int8", "fp8_channel"]
    status, _, err = command("setup", "-o", path, "params_to_ignore=[q]")
    assert status == 1
    assert "'params_to_ignore' cannot be applied here" in err
    assert len(yaml.safe_load(path.read_text())["configs"]) == 2


def test_a_profile_of_our_own_checkpoint_finds_no_difference(command, folder, tmp_path):
    write_checkpoint(PretrainedSource(str(folder)), tmp_path / "codes", "int8", dtype=torch.float32)
    words = ("profile", "-m", folder, "-qm", tmp_path / "codes", "-o", tmp_path / "profile.json", "--fn")
    status, out, _ = command(*words, "int8")
    assert status == 0
    assert "14 weights of codes are int8" in out
    assert "smoothed" not in out
    found = json.loads((tmp_path / "profile.json").read_text())
    for row in found["weights"].values():
        assert (row["codes_equal"], row["scale_ratio"]) == (1.0, 1.0)
        assert row["error"] == row["error_fresh"] < 0.01
    assert found["smoothed"] == []
    assert command("setup", "-p", tmp_path / "profile.json", "-o", tmp_path / "c.yaml")[0] == 0
    status, _, err = command(*words, "fp8")
    assert status == 1
    assert "is torch.int8, and --fn is fp8" in err
    status, _, err = command("profile", "-q", folder, "-o", tmp_path / "p", "--fn", "fp8")
    assert status == 1
    assert "has no weight scales" in err


def test_a_smoothed_checkpoint_is_told(command, folder, new_model, tmp_path):
    """As SmoothQuant makes it: the same function, other norms and weights."""
    model = new_model(seed=2).requires_grad_(False)
    for layer in model.model.layers:
        factor = torch.linspace(0.5, 2, 16)
        layer.input_layernorm.weight.div_(factor)
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.weight.mul_(factor)
    model.save_pretrained(tmp_path / "smooth")
    write_checkpoint(PretrainedSource(str(tmp_path / "smooth")), tmp_path / "codes", "int8", dtype=torch.float32)
    _, out, _ = command("profile", "-m", folder, "-q", tmp_path / "codes", "-o", tmp_path / "profile.json")
    assert "2 other weights differ, the first model.layers.0.input_layernorm.weight: the checkpoint is smoothed" in out
    rows = json.loads((tmp_path / "profile.json").read_text())["weights"]
    assert rows["model.layers.0.mlp.up_proj.weight"]["codes_equal"] == 1.0
    assert rows["model.layers.0.self_attn.q_proj.weight"]["codes_equal"] < 0.5


def test_verify_measures_the_budget(command, folder, tmp_path):
    (tmp_path / "prompts.txt").write_text("1+1=\n12+34=\n7+8=\n\n")
    words = ("verify", "-m", folder, "--prompts", tmp_path / "prompts.txt", "--tokens", 16, "--samples", 8)
    status, out, err = command(*words, "--json", tmp_path / "budget.json", "--most", 1)
    assert status == 0, err
    assert out.count("\n") == 4
    assert "engine: in_process" in out
    found = json.loads((tmp_path / "budget.json").read_text())
    weights, rollout = found["weights"], found["rollout"]
    assert weights["weights"] == 14
    assert 0.001 < weights["mean"] <= weights["largest"] < 0.02
    assert 0 < rollout["mean"] < rollout["largest"] < 0.5
    assert 0.9 < rollout["effective_sample_share"] <= 1
    assert 3 * 8 <= rollout["tokens"] <= 3 * 8 * 16
    assert 0 < rollout["low"] < rollout["mean"] < rollout["high"]
    assert f"of 3 prompts (95 % [{rollout['low']:.4f}, {rollout['high']:.4f}] over prompts)" in out
    (tmp_path / "prompts.txt").write_text("1+1=\n12+34=\n")
    status, out, _ = command(*words, "--most", rollout["mean"] / 2)
    assert status == 1
    assert "the mean log-probability error is above" in out and "no interval from 2 prompts, it takes 3" in out


def test_errors_of_weights_by_precision(folder):
    """fp8 has 3 bits behind the point, int8 about 7 of the largest number of a row."""
    errors = {p: weight_errors(PretrainedSource(str(folder)), p, dtype=torch.float32) for p in (*LAYOUTS, "fp32")}
    assert errors["fp32"].weights == 0
    assert 0.001 < errors["int8"].mean < 0.02
    for precision in ("fp8", "fp8_channel", "fp8_block"):
        assert 0.02 < errors[precision].mean < 0.04
        assert errors[precision].where.endswith(".weight")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("verify", "-m", "M", "--fn", "fp8", "--engine", "in_process", "--prompts", "P"), "needs --engine vllm"),
        (("verify", "-m", "M", "--engine", "in_process"), "give --prompts FILE"),
        # Nothing was measured, and the exit status was 0: a limit that a gate relies on.
        (
            ("verify", "-m", "M", "--fn", "fp8", "--prompts", "P", "--most", "0.05"),
            "--prompts and --most: give --engine vllm",
        ),
        (("verify", "-m", "M", "--most", "0.05"), "nothing reads --most: give --engine in_process or vllm"),
        (("verify", "-m", "M", "--engine", "none", "--prompts", "P"), "nothing reads --prompts"),
        (("profile", "-q", "M", "-o", "x"), "give --model"),
        (("setup", "--fn", "int8", "-p", "P", "-o", "x"), "prompts.jsonl is no profile of rl-fn quantize profile"),
        (
            ("setup", "--fn", "int8", "-p", "T", "-o", "x"),
            "two.jsonl is no profile of rl-fn quantize profile, one JSON",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(command, folder, tmp_path, words, message):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "two.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "1+2="}\n')
    named = {"M": folder, "P": tmp_path / "prompts.jsonl", "T": tmp_path / "two.jsonl"}
    status, _, err = command(*(named.get(word, word) for word in words))
    assert status == 1
    assert message in err


NO_NUMBERS = ("nan", "inf", "-inf", "-1", "0.0.1", "one", "")
NUMBERS = [
    (command, action.option_strings[-1], action.option_strings[-1] in ("--seed", "--most"))
    for command, each in parser()._subparsers._group_actions[0].choices.items()
    for action in each._actions
    if action.type not in (None, Path)
]
"""Command, option, and whether the option takes 0: all options whose values are not taken as they are."""


@pytest.mark.parametrize(("name", "option", "takes_zero"), NUMBERS)
def test_a_number_without_sense_is_refused_by_its_option(name, option, takes_zero, capsys):
    for value in (*NO_NUMBERS, *(() if takes_zero else ("0",))):
        with pytest.raises(SystemExit, match="2"):
            parser().parse_args([name, "-m", "M", option, value])
        said = capsys.readouterr().err.splitlines()[-1]
        assert re.fullmatch(rf"rl-fn quantize {name}: error: argument {option}: expected a \w+ .+, got {value!r}", said)
    if takes_zero:
        assert vars(parser().parse_args([name, "-m", "M", option, "0"]))[option[2:]] == 0


def test_numbers_are_read_everywhere():
    assert len(NUMBERS) == 6


@pytest.mark.parametrize("content", ["é=\n".encode("latin-1"), b"\xff\xfe1\0", b"\x80\x02]q\0."])
@pytest.mark.parametrize("before", [0, 2])
def test_prompts_that_are_no_text_name_the_file_and_the_line(command, before, content, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b'{"prompt": "1+1="}\n' * before + content)
    status, _, err = command("verify", "-m", "M", "--prompts", path)
    assert status == 1 and err.startswith(
        f"rl-fn: error: {path}, line {before + 1} is no text in UTF-8: --prompts takes"
    )


def test_an_engine_that_is_not_installed_is_refused_with_the_way_to_install_it(command, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    status, _, err = command("verify", "-m", "M", "--prompts", "no file", "--engine", "vllm")
    assert status == 1 and "--engine vllm: vllm is not installed" in err
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    for finding in doctor.packages():
        assert (finding.remedy is not None and finding.remedy in err) == finding.name.startswith("vllm")


BAD_ROWS = {"no JSON": "{'prompt': 1}", "no prompt": '{"answer": "2"}', "no object": "[1]", "no text": '{"prompt": 3}'}


@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize("place", [1, 2, 4])
def test_a_bad_row_of_prompts_is_named_by_its_line(bad, place, tmp_path):
    """Blank lines are counted, as an editor counts them."""
    lines = ['{"prompt": "1+1="}', "", '{"prompt": "1+2="}', '{"prompt": "1+3="}', ""]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    assert read_prompts(tmp_path / "prompts.jsonl") == ["1+1=", "1+2=", "1+3="]
    lines[place - 1] = BAD_ROWS[bad]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=rf"prompts\.jsonl, (row|line) {place}\b"):
        read_prompts(tmp_path / "prompts.jsonl")
