"""The command line's own part: which words are refused, what an error looks like, and the process's status."""

import contextlib
import errno
import io
import re
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import jinja2
import pytest
import torch
from safetensors import SafetensorError

from rl_bridge.checkpoints import CheckpointError
from rl_bridge.common.terminal import StopRequest
from rl_bridge.executors.executor import WorkerDied, worker_error
from rl_bridge.run.run import Stopped
from rl_tools import cli
from rl_tools.cli import main, report
from rl_tools.trainer_options import TRAINERS, load
from rl_tools.trainers import config_of, parse
from rl_train.policy_configs import policy, quickstart

REFUSED = {
    "out of the folder": (["--name", "../../x"], "name is that of a folder in runs, not a path and not hidden"),
    "a name of a space, USR-18": (["--name", " "], "without spaces at its ends, got ' '"),
    "a name that writes backwards, USR-12": (["--name", "x\u202ey"], "of characters that can be printed and"),
    "a path": (["--name", "a/b"], "name is that of a folder"),
    "hidden": (["--name", ".x"], "name is that of a folder"),
    "no name": (["--name", ""], "name is that of a folder"),
    "held out": (["--held-out", "0"], "held_out must be at least 1, got 0"),
    "checkpoints": (["--checkpoint-every", "0"], "checkpoint_every must be at least 1, got 0"),
    "kept": (["--keep-checkpoints", "0"], "keep_checkpoints must be at least 1, got 0"),
    "skips": (["--stop-after-skips", "-1"], "stop_after_skips must be at least 1, got -1"),
    "threads": (["--threads", "0"], "threads must be at least 1, got 0"),
    "temperature": (["--policy.sampling.temperature", "nan"], "policy.sampling: temperature must be 0, for"),
    "infinite": (["--policy.sampling.temperature", "inf"], "policy.sampling: temperature must be 0, for"),
    "rate": (["--optimizer.learning-rate", "nan"], "optimizer: need a finite learning_rate > 0"),
    "coefficient": (["--objective.kl.coef", "-1"], "kl.coef must not be negative, got -1.0"),
    "coefficient of entropy": (["--objective.entropy.coef", "-1"], "entropy.coef must not be negative, got -1.0"),
    "seed": (["--seed", "-1"], "seed must be from 0 to 2³² − 1, got -1"),
    "of the objective": (["--objective.kl.coef", "nan"], "--objective.kl.coef must be a number, got nan"),
    "seed of sampling": (["--policy.sampling.seed", "1"], "policy.sampling.seed"),
    "output": (["--output"], "--output needs a value behind it"),
}


@pytest.mark.parametrize("words", REFUSED.values(), ids=list(REFUSED))
def test_an_option_that_cannot_be_is_refused_by_name_before_anything_runs(words, capsys):
    """USR-15: it was found late, and the folder of a run was left."""
    given, message = words
    with pytest.raises(SystemExit) as stopped:
        parse(quickstart(), given, prog="rl-fn train policy")
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    text = " ".join((printed.err + printed.out).replace("│", " ").split())
    assert text.count(message) == 1 and "Pipeline" not in text


OWN_LOSS = "import sys\nprint('a hint', id(sys.stderr), file=sys.stderr)\n{}\n"
TAKEN = "def f(batch): return batch.logprobs"
ENDS = {
    "it is taken": (TAKEN, [], None),
    "it exits": ("sys.exit(3)", [], SystemExit),
    "it raises": ("raise RuntimeError('no licence')", [], SystemExit),
    "there is no such name": ("", [], SystemExit),
    "it is stopped": ("raise KeyboardInterrupt", [], KeyboardInterrupt),
    "an option behind it is refused": (TAKEN, ["--objective.dual-clip", "3"], SystemExit),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_a_loss_file_prints_is_on_the_terminal_once(end, tmp_path, capsys):
    """It has the process's own stream: a handler of ``logging`` keeps what it finds, for the life of the process."""
    line, words, error = ENDS[end]
    (tmp_path / "own.py").write_text(OWN_LOSS.format(line))
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        config_of(["policy", "--objective.loss", f"{tmp_path / 'own.py'}:f", *words], "train")
    printed = capsys.readouterr().err
    assert printed.startswith(f"a hint {id(sys.stderr)}\n") and printed.count("a hint") == 1
    assert printed.count("rl-fn: error: ") == (error is SystemExit) and "╭" not in printed


class _OfOurs(TypeError):
    pass


class Own(Exception):
    pass


def broken(error):
    def run(*_):
        raise error

    return run


DISK = OSError(errno.ENOSPC, "No space left on device", "runs/x/metrics.jsonl")
EXPECTED = {
    "a value": (ValueError("no such\n  thing"), "no such thing"),
    "disk full": (DISK, "No space left on device: runs/x/metrics.jsonl; free some space on the disk"),
    "read-only": (
        OSError(errno.EROFS, "Read-only file system", "/x"),
        "Read-only file system: /x; give --output a folder that can be written to",
    ),
    "permission": (
        PermissionError(errno.EACCES, "Permission denied", "/x"),
        "Permission denied: /x; give --output a folder that can be written to",
    ),
    "not finite": (FloatingPointError("3 in a row"), "FloatingPointError: 3 in a row"),
    "safetensors": (SafetensorError("header too large"), "SafetensorError: header too large"),
    "template": (jinja2.TemplateSyntaxError("no endfor", 3), "TemplateSyntaxError: no endfor"),
    "checkpoint": (CheckpointError("not written"), "CheckpointError: not written"),
    "a dead rank": (WorkerDied("rank 1, process 7, was killed"), "WorkerDied: rank 1, process 7, was killed"),
    "memory": (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError: CUDA out of memory"),
    "nothing said": (MemoryError(), "MemoryError"),
    "of a private class": (_OfOurs("no reader"), "TypeError: no reader"),
    "in a worker": (worker_error(1, "train_step", ValueError("bad row"), "Traceback …"), "bad row"),
}


@pytest.mark.parametrize("error", EXPECTED.values(), ids=list(EXPECTED))
def test_what_can_be_expected_is_one_line(error, capsys):
    raised, message = error
    assert report(broken(raised), None) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"rl-fn: error: {message}") and printed.err.count("\n") == 1
    assert "Traceback (" not in printed.err and printed.out == ""


def test_a_missing_part_of_a_package_is_not_the_package(capsys):
    """The user's own file may import ``torch.nope``."""
    lines = [line for line in requires("rl-fn") or [] if "extra == 'bridge'" in line]
    names = [re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines]
    assert "torch" in names
    for name in names:
        for missing, message in (
            (f"{name}.nope", f"No module named '{name}.nope'"),
            (name, f"this command needs {name}, which is not installed: pip install '.[bridge]'"),
        ):
            error = ModuleNotFoundError(f"No module named {missing!r}", name=missing)
            assert report(broken(error), None) == 1
            assert capsys.readouterr().err == f"rl-fn: error: {message}\n"


def test_notes_say_how_to_go_on(capsys):
    error = OSError(errno.ENOSPC, "No space left on device")
    error.add_note("the newest checkpoint is x; go on with --resume")
    assert report(broken(error), None) == 1
    assert capsys.readouterr().out == "the newest checkpoint is x; go on with --resume\n"


@pytest.mark.parametrize(("raised", "asked"), [(KeyError("x"), False), (Own("x"), False), (ValueError("x"), True)])
def test_what_nobody_expected_and_what_is_asked_for_has_its_traceback(raised, asked, capsys):
    assert report(broken(raised), None, traceback=asked) == 1
    lines = capsys.readouterr().err.splitlines()
    # Where other tests have made process groups, torch puts the rank in front of each line, once for each.
    assert lines[0].replace("[rank0]: ", "") == "Traceback (most recent call last):"
    assert lines[-1].startswith("rl-fn: error: ")
    assert any("in run" in line for line in lines)


HELPED = [
    "",
    "train",
    "doctor",
    "report",
    "plan",
    "export",
    "tune",
    "tune report",
    "quantize",
    "quantize verify",
    "check",
]


@pytest.mark.parametrize("words", HELPED)
def test_help_is_no_error_tool_15(words, capsys):
    assert main([*words.split(), "--help"]) == 0
    said = capsys.readouterr()
    assert "usage" in said.out and not said.err


@pytest.mark.parametrize("code", [None, 0])
def test_a_function_that_leaves_the_process_is_no_success(code, capsys):
    assert report(broken(SystemExit(code)), None) == 1
    assert capsys.readouterr().err == "rl-fn: error: a function called sys.exit() in the middle of the run\n"


def test_other_ranks_leave_as_they_do_and_a_status_is_kept(monkeypatch):
    with pytest.raises(SystemExit, match="3"):
        report(broken(SystemExit(3)), None)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="0"):
        report(broken(SystemExit(0)), None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_has_its_status(number, capsys):
    assert report(broken(Stopped("stopped after step 2 of 3 of policy", "here", number)), None) == 128 + number
    message = "stopped after step 2 of 3 of policy; go on with the same command and --name here --resume\n"
    assert capsys.readouterr().out == message


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_is_no_traceback_and_has_its_status(number, capsys):
    """ROLL-14: two SIGTERMs ended with 130."""
    with StopRequest(), pytest.raises(KeyboardInterrupt) as stopped:
        signal.raise_signal(number)
        signal.raise_signal(number)
    assert "signal again" in capsys.readouterr().out or number == signal.SIGINT
    error = stopped.value
    error.add_note("the newest checkpoint is x")
    assert report(broken(error), None) == 128 + number
    assert capsys.readouterr() == ("stopped at once; the newest checkpoint is x\n", "")


def test_a_platform_that_jax_has_not_is_named_with_its_variable_usr_16(monkeypatch, capsys):
    error = RuntimeError("Unable to initialize backend 'nope': it is not in the list of known backends: ['cpu']")
    error.add_note("JAX has removed its internal frames")
    monkeypatch.setenv("JAX_PLATFORMS", "nope")
    assert report(broken(error), None) == 1
    said = f"rl-fn: error: JAX_PLATFORMS=nope: {error}; unset the variable, or set JAX_PLATFORMS=cpu\n"
    assert capsys.readouterr() == ("", said)
    monkeypatch.delenv("JAX_PLATFORMS")  # then nobody asked, and the traceback says more
    assert report(broken(error), None) == 1
    assert "Traceback" in capsys.readouterr().err


def test_traceback_is_an_option_of_every_trainer(monkeypatch, capsys):
    monkeypatch.setattr(cli, "load", lambda place: policy if place.endswith(":policy") else broken(ValueError("no")))
    assert main(["train", "policy", "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert main(["train", "policy"]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_a_terminal_without_utf_8_ends_no_run(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(cli, "load", lambda place: policy if place.endswith(":policy") else finished)
    assert main(["train", "policy"]) == 0
    terminal.flush()
    assert terminal.buffer.getvalue() == b"held-out accuracy 0.10 ? 0.20 in 3 s\n"


MISSPELT = {
    "trian policy": "unknown command 'trian': did you mean rl-fn train?",
    "train polcy": "'polcy' is no trainer (sft, reward-model, preference, policy), no run file",
    "train grop --steps 3": "no folder with run.toml; did you mean grpo?",
    "train own_loss": "'own_loss' is a loop, and no trainer",
    "train conversations": "policy --environment FILE.py:NAME trains so, and rl-fn new conversations FILE.py",
    "train policy PPO": "'PPO': write objective:ppo",
    "train grpo objective:grpo": "objective:grpo and objective:grpo: give one of them",
    "train --policy.steps 3 grpo": "in front of all options: grpo --policy.steps 3",
    "tune grpo --space.optimizer.learning-rate 1e-3,1e-4 --name": "argument --name: expected one argument",
    "train Own_loss": "rl-fn new own_loss FILE.py writes the loop",
    "train preference --steps 3 dpo": "'dpo': write loss:dpo",
    "train grpo objective:gspo": "objective:grpo and objective:gspo: give one of them",
    "train dpo objective:grpo": "objective:grpo is of train policy; here there are loss:",
    "train policy objective:gspoo": "objective:gspoo: did you mean objective:gspo",
    "train policy --reward a.py:b objective:gspoo": "objective:gspoo: did you mean objective:gspo",
    "train policy --objective.tau 1": "--objective.tau is of objective:kimi; here it is objective:dapo",
    "train policy --sft.lr 1": "--sft.lr: did you mean --sft.optimizer.learning-rate",
    "train policy --polcy.steps 1": "--polcy.steps: did you mean --policy.steps",
    "train policy --policy.responses-per-prompt 8": "--policy.responses-per-prompt: did you mean --policy.sampling.n?",
    "train policy --policy.sampling.seed 3": "--policy.sampling.seed: did you mean --seed?",
    "train sft --packing True": "--packing takes no value",
    "train sft --sft.steps 3": "--sft.steps: did you mean --steps",
    "train reward-model --reward-model.rows-per-step 3": "--reward-model.rows-per-step: did you mean --rows-per-step?",
    "train preference --preference.evaluate-every 3": "--preference.evaluate-every: did you mean --evaluate-every?",
    "train preference loss:bradley-terry": "loss:bradley-terry is of train reward-model; here there are loss:",
    "train reward-model loss:dpo": "loss:dpo is of train preference; here there are loss:",
    "train preference objective:grpo": "objective:grpo is of train policy; here there are loss:",
    "train preference objective:gspoo": "objective:gspoo is of train policy; here there are loss:",
    "train sft loss:dpoo": "error: loss:dpoo is of train reward-model, train preference\n",
    "train preference --preference.shift-momentum 0.5": "did you mean --loss.shift-momentum?",
}


@pytest.mark.long
@pytest.mark.parametrize("words", MISSPELT)
def test_a_misspelt_word_gets_its_near_names_tool_15(words, capsys):
    try:
        status = main(words.split())
    except SystemExit as left:
        status = left.code
    said = capsys.readouterr().err
    assert status == 2 and MISSPELT[words] in said and len(said.splitlines()) < 30


def test_what_prints_words_alone_imports_no_library_of_models():
    """Of the whole command: help, version and a misspelt word take the time of their own modules."""
    code = (
        "import sys; from rl_tools.cli import main\n"
        "for words in (['--help'], ['--version'], ['trian']): main(words)\n"
        "heavy = {'torch', 'transformers', 'jax', 'numpy', 'tyro', 'datasets', 'rl_fn'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: rl-fn train") and f"rl-fn {version('rl-fn')}" in done.stdout


WITHOUT_TORCH = [
    "train sft",
    "train policy --help",
    "train preference --help-all",
    "report x",
    "plan policy",
    "tune policy",
    "export x --to tensorboard",
    "quantize --help",
    "check trl",
]


@pytest.mark.long
def test_without_pytorch_a_command_names_the_extra_that_has_it():
    """``pip install .`` installs the command too."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))["project"]
    names = [re.split(r"[^\w-]", line)[0].replace("-", "_") for line in project["optional-dependencies"]["bridge"]]
    code = (
        f"import sys; sys.modules |= dict.fromkeys({names})\n"
        "from rl_tools.cli import main\n"
        f"for words in {WITHOUT_TORCH}: assert main(words.split()) == 1; print('behind', words, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    lines = done.stderr.splitlines()
    assert lines[1::2] == [f"behind {words}" for words in WITHOUT_TORCH], done.stderr
    line = re.compile(r"rl-fn: error: this command needs (\w+), which is not installed: pip install '\.\[bridge\]'")
    matches = [line.fullmatch(text) for text in lines[::2]]
    assert all(match is not None and match[1] in names for match in matches), done.stderr


def finished(*_):
    return {"result": "held-out accuracy 0.10 → 0.20", "seconds": 3.2}


def test_every_trainer_of_the_table_is_there_with_a_default():
    for name, trainer in TRAINERS.items():
        default = load(trainer.default)
        config = default()
        assert callable(load(trainer.run)), name
        assert config.resume is False and config.name, name
