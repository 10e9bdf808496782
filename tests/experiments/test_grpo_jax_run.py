"""The whole script with a very small model: stop and resume, two devices, no torch, what it leaves behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from experiments import grpo_jax
from experiments.flax_qwen2 import Qwen2, Qwen2Config, save_pretrained
from experiments.flax_qwen2.run_folder import RunFolder
from tests.support import warm

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
OPTIONS = (
    *("--warm-start-steps", "3", "--warm-start-batch", "8", "--steps", "3", "--held-out", "30"),
    *("--prompts", "16", "--groups", "8", "--samples", "4", "--temperature", "2", "--objective", "grpo"),
    *("--kl-coef", "0.1", "--learning-rate", "0.01", "--warmup", "2"),
    *("--evaluate-every", "2", "--checkpoint-every", "2"),
)
# The answer is to say nothing: a random model does that now and then, so that there is something to learn.
ROWS = [{"prompt": f"{a}{b}", "answer": ""} for a in range(10, 20) for b in range(10)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=15, hidden_size=16, intermediate_size=16, num_hidden_layers=1, **heads)
    save_pretrained(nnx.jit(lambda: Qwen2(config, nnx.Rngs(0)))(), folder)
    return folder


def run(output: Path, tiny: Path, *options: str) -> int:
    # Optax promotes integers and scalars on its own.
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        patch.setattr(grpo_jax, "arithmetic_rows", lambda operations: ROWS)
        return grpo_jax.main(["--output", str(output), "--model", str(tiny), *OPTIONS, *options])


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny) -> Path:
    """An uninterrupted run on one device."""
    output = tmp_path_factory.mktemp("runs")
    assert run(output, tiny, "--name", "whole") == 0
    return output / "whole"


def records(folder: Path) -> list[dict]:
    clock = {"seconds", "tokens_per_second"}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model" / "model.safetensors")


def assert_same(ours: Path, theirs: Path) -> None:
    assert records(ours) == records(theirs)
    found = weights(ours)
    for name, value in weights(theirs).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_what_a_run_leaves(whole):
    summary = json.loads((whole / "summary.json").read_text())
    logged = records(whole)
    assert [r["step"] for r in logged] == list(range(6))
    assert [r["step"] for r in logged if "held_out" in r] == [4, 5]
    assert logged[-1]["held_out"] == pytest.approx(summary["accuracy_after"], abs=1e-6)
    assert all(r["grad_norm"] > 0 and r["entropy"] > 0 for r in logged[3:]) and logged[-1]["kl"] > 0
    assert logged[2]["nll"] < logged[0]["nll"] and 0 <= summary["accuracy_before"] <= 1
    assert (whole / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert not list(whole.rglob("*.tmp"))


def test_stopped_and_resumed_equals_uninterrupted(monkeypatch, tmp_path, tiny, whole, capsys):
    with pytest.raises(ValueError, match="no run to resume"):
        run(tmp_path, tiny, "--name", "whole", "--resume")
    # The end of the warm start, and the middle of GRPO.
    done, stops = RunFolder.done, {2: signal.SIGINT, 4: signal.SIGTERM}

    def interrupted(self, step, *arguments, **options):
        if step in stops:
            os.kill(os.getpid(), stops[step])
        done(self, step, *arguments, **options)

    monkeypatch.setattr(RunFolder, "done", interrupted)
    for start, step in (([], 3), (["--resume"], 5)):
        assert run(tmp_path, tiny, "--name", "whole", *start) == 130
        assert f"stopped after step {step} of 6" in capsys.readouterr().err
        assert not (tmp_path / "whole" / "summary.json").exists()
    with pytest.raises(ValueError, match="unfinished run"):
        run(tmp_path, tiny, "--name", "whole")
    with pytest.raises(ValueError, match=r"other options.*'learning_rate': \(0.\d+, 0.5\)"):
        run(tmp_path, tiny, "--name", "whole", "--resume", "--learning-rate", "0.5")
    assert run(tmp_path, tiny, "--name", "whole", "--resume") == 0
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    before, after, seconds = (summary[name] for name in ("accuracy_before", "accuracy_after", "seconds"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"held-out accuracy {before:.2f} → {after:.2f} in {seconds:.0f} s"
    assert_same(tmp_path / "whole", whole)


# The process kills itself: in the middle of a step, or of a checkpoint whose files are written and not yet listed.
KILLED = """
import json, os, signal, sys
from experiments import grpo_jax
from experiments.flax_qwen2.run_folder import RunFolder
from rl_bridge.common import step_folders

where, step = sys.argv[1], int(sys.argv[2])
grpo_jax.arithmetic_rows = lambda operations: json.loads(sys.argv[3])
commit, done = step_folders.commit, RunFolder.done

def kill(now, at):
    if (now, at) == (where, step):
        os.kill(os.getpid(), signal.SIGKILL)

def dying_commit(path, *arguments, **options):
    kill("save", step_folders.step_of(path))
    commit(path, *arguments, **options)

def dying_done(self, at, *arguments, **options):
    kill("step", at)
    done(self, at, *arguments, **options)

step_folders.commit, RunFolder.done = dying_commit, dying_done
grpo_jax.main(sys.argv[4:])
"""


@pytest.mark.parametrize(
    ("where", "step", "left"),
    [
        ("save", 4, ["step-00000002", "step-00000004.tmp"]),
        pytest.param("save", 2, ["step-00000002.tmp"], marks=pytest.mark.slow),
        pytest.param("step", 3, ["step-00000002"], marks=pytest.mark.slow),
        pytest.param("step", 5, ["step-00000002", "step-00000004"], marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(tmp_path, tiny, whole, where, step, left):
    arguments = ["--output", str(tmp_path), "--model", str(tiny), "--name", "whole", *OPTIONS]
    killed = warm.run("-c", KILLED, where, str(step), json.dumps(ROWS), *arguments, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    checkpoints = tmp_path / "whole" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == left
    assert run(tmp_path, tiny, "--name", "whole", "--resume") == 0
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000004", "step-00000006"]
    assert_same(tmp_path / "whole", whole)


def test_damage_is_named_and_an_older_checkpoint_taken(tmp_path, tiny, whole, capsys):
    folder = tmp_path / "whole"
    shutil.copytree(whole, folder)
    (folder / "summary.json").unlink()
    newest = folder / "checkpoints" / "step-00000006"
    shard = max((newest / "state").rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 16
    shard.write_bytes(content)
    assert run(tmp_path, tiny, "--name", "whole", "--resume") == 0
    message = capsys.readouterr().err
    assert "going on from step-00000004" in message and f"{shard} has another checksum" in message
    assert_same(folder, whole)
    for path in (folder / "checkpoints").glob("step-????????"):
        (path / "progress.json").unlink()
    (folder / "summary.json").unlink()
    with pytest.raises(
        ValueError, match=r"no checkpoint of .* is whole: .*progress.json is missing; .*progress.json is"
    ):
        run(tmp_path, tiny, "--name", "whole", "--resume")


# After conftest.py's, which make compiling faster and the program slower: the better part for a program this small.
DEVICES = "--xla_force_host_platform_device_count=2"
SCRIPT = """
import json, sys
from experiments import grpo_jax
grpo_jax.arithmetic_rows = lambda operations: json.loads(sys.argv[1])
assert grpo_jax.main(sys.argv[2:]) == 0
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def test_two_devices_equal_one_and_nothing_imports_torch(tmp_path, tiny, whole):
    flags = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}", "JAX_PLATFORMS": "cpu"}
    arguments = [json.dumps(ROWS), "--output", str(tmp_path), "--model", str(tiny), "--name", "two", *OPTIONS]
    command = [sys.executable, "-c", SCRIPT, *arguments]
    finished = subprocess.run(command, cwd=ROOT, env=os.environ | flags, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert len(json.loads((tmp_path / "two" / "summary.json").read_text())["devices"]) == 2
    for one, two in zip(records(whole), records(tmp_path / "two"), strict=True):
        assert one.pop("stage") == two.pop("stage")
        assert one == pytest.approx(two, rel=1e-4, abs=1e-5)
    ours, theirs = weights(tmp_path / "two"), weights(whole)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 400}, "groups ≤ prompts"),
        ({"steps": 0}, "counts must be ≥ 1"),
        ({"max_new_tokens": 2}, "longest answer has 4 tokens"),
        ({"devices": 7}, "devices must be 1 …"),
        ({"held_out": 16200}, "cannot hold out"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        grpo_jax.run(grpo_jax.Config(output=tmp_path, **options))
    assert not list(tmp_path.iterdir())


def test_a_model_with_another_vocabulary_is_refused(tmp_path, tiny):
    (tmp_path / "tiny").mkdir()
    for file in tiny.iterdir():
        (tmp_path / "tiny" / file.name).write_bytes(file.read_bytes())
    vocabulary = {character: i for i, character in enumerate(grpo_jax.ALPHABET)}
    (tmp_path / "tiny" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    with pytest.raises(ValueError, match="numbers the characters otherwise"):
        grpo_jax.starting_model(grpo_jax.Config(model=tmp_path / "tiny"))


def test_batches_go_through_every_row_before_any_comes_again():
    data = grpo_jax.problems([{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(10, 34)], 4)
    seen = [tuple(row) for step in range(3) for row in grpo_jax.batch_at(data, step, 8, 5).prompts]
    assert len(set(seen)) == 24
    again = [tuple(row) for step in range(3, 6) for row in grpo_jax.batch_at(data, step, 8, 5).prompts]
    assert set(again) == set(seen) and again != seen
