"""A run that was killed or stopped and taken up again equals the one that was not, bit for bit."""

import signal

import pytest

from rl_tools.cli import main
from tests.support import warm
from tests.support.results import assert_same, metrics, result

pytestmark = pytest.mark.long

# The process kills itself in the middle of a step: no handler, no finally, nothing flushed.
DYING = """
import os, signal, sys
from rl_bridge.checkpoints import Checkpointer
from rl_tools.cli import main
from rl_bridge.modules.trainable import CausalLMModule

# What the kill finds on the disk is then known. Kills while one is being written: tests/bridge/checkpoints.
Checkpointer.__init__.__kwdefaults__["asynchronous"] = False
when, version = sys.argv[1], int(sys.argv[2])
update = CausalLMModule.optimizer_step

def dying(self):
    if when == "before" and self.weights_version() == version:
        os.kill(os.getpid(), signal.SIGKILL)
    result = update(self)
    if when == "after" and self.weights_version() == version:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

CausalLMModule.optimizer_step = dying
sys.exit(main(sys.argv[3:]))
"""

# Even digits beyond two are good: some groups of an untrained model get some, some none. A little of the reward is
# drawn from the global generators. Ctrl-C comes in the middle of the step after ``lines`` were logged, if the file
# ``interrupt`` asks for it.
REWARD = """
import signal
from pathlib import Path

import numpy
import torch

FLAG = Path(__file__).with_name("interrupt")

def even_digits(completion, row):
    if FLAG.exists():
        metrics, lines = FLAG.read_text().split("|")
        # A reward is tried before there is a run.
        if Path(metrics).exists() and len(Path(metrics).read_text().splitlines()) == int(lines):
            FLAG.unlink()
            signal.raise_signal(signal.SIGINT)
    noise = numpy.random.random() + float(torch.rand(()))
    digits = sum(character in "02468" for character in completion)
    return max(digits - 2, 0) * (1 + noise / 100)
"""


@pytest.fixture
def reward(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(REWARD)
    return f"{path}:even_digits"


def die(words, when, version):
    done = warm.run("-c", DYING, when, str(version), *map(str, words), timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]


def test_killed_in_supervision_and_in_grpo(tmp_path, arguments, reward, run_to_end):
    options = {"--reward": reward, "--objective.kl.coef": 0.05, "--policy.updates-per-step": 2}
    # The second kill comes after the reference took the policy's weights: the checkpoint has them.
    options["--policy.reference-every"] = 3
    whole = result(run_to_end(arguments("whole", "objective:grpo", **options)))
    assert len(whole["metrics"]) == 6 + 8
    assert whole["metrics"][-1]["kl"] > 0 and whole["metrics"][-1]["grad_norm"] > 0

    words, folder = arguments("killed", "objective:grpo", **options), tmp_path / "killed"
    die(words, "after", 5)  # in step 4 of supervision, the weights updated, nothing of it logged
    assert [(m["stage"], m["step"]) for m in metrics(folder)] == [("sft", step) for step in range(4)]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]

    words.append("--resume")
    die(words, "before", 6 + 2 * 4 + 1)  # in step 4 of GRPO, between its two updates
    assert [(m["stage"], m["step"]) for m in metrics(folder)[-2:]] == [("policy", 2), ("policy", 3)]
    # Every third step, and step 3 of GRPO, whose evaluation was the best so far.
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-00000009", "step-00000010"}
    assert not (folder / "summary.json").exists()

    half_written = folder / "checkpoints" / "step-00000012.tmp"
    half_written.mkdir()
    (half_written / "manifest.json").write_bytes(b"half")
    assert_same(result(run_to_end(words)), whole)
    assert not half_written.exists()

    # Killed after the last step, before the results were written.
    (folder / "summary.json").unlink()
    assert_same(result(run_to_end(words)), whole)


def test_stopped_by_ctrl_c(tmp_path, arguments, reward, run_to_end, capsys):
    options = {"--reward": reward, "--policy.updates-per-step": 3}
    whole = result(run_to_end(arguments("whole", **options)))
    assert any(0 < m.get("informative", 0) < 1 for m in whole["metrics"])

    words, folder = arguments("stopped", **options), tmp_path / "stopped"
    (tmp_path / "interrupt").write_text(f"{folder / 'metrics.jsonl'}|{6 + 4}")
    capsys.readouterr()
    assert main(words) == 130
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "stopped after step 5 of 8 of policy; go on with the same command and --name stopped --resume"
    assert max(path.name for path in (folder / "checkpoints").iterdir()) == "step-00000011"
    assert not (folder / "summary.json").exists() and not (folder / "model").exists()
    assert_same(result(run_to_end([*words, "--resume"])), whole)


def test_other_data_is_no_continuation(tmp_path, arguments, reward, capsys):
    words = arguments("run", **{"--reward": reward, "--sft.steps": 3, "--policy.steps": 1})
    assert main(words) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main([*words, "--resume", "--held-out", "30"]) == 1
    message = capsys.readouterr().err
    assert "was made with other options: --held-out was 20 and is 30; the data is another one" in message
    assert message.count("\n") == 1
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert {path: content for path, content in after.items() if path in before and "events" not in str(path)} == {
        path: content for path, content in before.items() if "events" not in str(path)
    }


def test_nothing_to_resume(tmp_path, arguments, capsys):
    assert main(arguments("absent", "--resume")) == 1
    assert "absent has no checkpoint to resume from: there is no such run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
