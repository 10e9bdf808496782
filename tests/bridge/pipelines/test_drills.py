"""The whole command, killed at random moments, resumed by seven at once, out of disk, with a gradient of NaN."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from rl_bridge.modules.trainable import Trainable
from rl_tools.cli import main
from tests.bridge.pipelines.killed import COMMAND, ended, lines, start
from tests.support.results import assert_same, metrics, result

REWARD = "def even_digits(completion, row):\n    return sum(c in '02468' for c in completion) + 0.1 * len(completion)\n"


@pytest.fixture
def words(tmp_path, arguments):
    (tmp_path / "reward.py").write_text(REWARD)
    options = {"--reward": f"{tmp_path / 'reward.py'}:even_digits", "--sft.steps": 3, "--policy.steps": 6}
    options["--policy.updates-per-step"] = 1
    return lambda name, *more: arguments(name, *more, **options)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_random_kills_end_as_no_kill(tmp_path, words, run_to_end):
    code, _, err = ended(start(words("whole")))
    assert code == 0, err[-2000:]
    whole, folder = result(tmp_path / "whole"), tmp_path / "killed"
    times = [json.loads(line)["time"] for line in lines(tmp_path / "whole")]
    a_step, generator, killed = (times[-1] - times[0]) / len(times), random.Random(0), 0
    resume: list[str] = []
    reached = set()
    while killed < 20:
        moment = generator.randrange(1, 5), generator.uniform(0.0, a_step)
        process = start(words("killed", *resume), *moment, folder / "metrics.jsonl")
        code, _, err = ended(process)
        assert code in (0, -signal.SIGKILL), err[-2000:]
        killed += code != 0
        reached.add(len(lines(folder)))
        resume = ["--resume"] if folder.exists() else []
        if code == 0:
            assert_same(result(folder), whole)
            if generator.random() < 0.5:  # half of the time from the start
                shutil.rmtree(folder)
                resume = []
    code, _, err = ended(start(words("killed", *resume)))
    assert code == 0, err[-2000:]
    assert_same(result(folder), whole)
    assert len(reached) > 3  # the kills were not all in one step


@pytest.mark.slow
def test_of_seven_resumes_at_once_one_goes_on(tmp_path, words, run_to_end):
    whole = result(run_to_end(words("whole")))
    run_to_end(words("run"))
    folder = tmp_path / "run"
    shutil.rmtree(max((folder / "checkpoints").iterdir()))
    found = [ended(process) for process in [start(words("run", "--resume")) for _ in range(7)]]
    refused = [err for code, _, err in found if code != 0]
    # One that comes when the first has ended goes on from the end, where nothing is left to do.
    assert len(refused) >= 1 and all("run is in use by" in err for err in refused)
    assert_same(result(folder), whole)


@pytest.mark.slow
def test_a_disk_that_is_full_keeps_the_last_checkpoint_and_says_how_to_go_on(tmp_path, words, run_to_end):
    whole = result(run_to_end(words("whole")))
    process = f'ulimit -f 40 && exec {sys.executable} -c "$COMMAND" -1 0 . "$@"'
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "COMMAND": COMMAND}
    command = ["bash", "-c", process, "command", *words("full")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr[-2000:]
    assert "rl-fn: error: " in done.stderr.splitlines()[-1] and "File too large" in done.stderr.splitlines()[-1]
    assert "go on with the same command and --name full --resume" in done.stdout
    code, _, err = ended(start(words("full", "--resume")))
    assert code == 0, err[-2000:]
    assert_same(result(tmp_path / "full"), whole)


@pytest.mark.long
def test_gradients_that_are_not_finite_stop_the_run_with_the_cause(tmp_path, words, monkeypatch, capsys):
    step = Trainable.optimizer_step

    def spoiled(self):
        if self.weights_version() >= 3 + 2:  # after two updates of the policy
            for parameter in self.trained_parameters():
                parameter.grad = torch.full_like(parameter, float("nan"))
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainable, "optimizer_step", spoiled)
        assert main(words("run", "--stop-after-skips", "2")) == 1
    printed, folder = capsys.readouterr(), tmp_path / "run"
    assert "not finite in 2 steps in a row" in printed.err and "stopped after step 4 of 6 of policy" in printed.err
    assert printed.err.splitlines()[-1].startswith("rl-fn: error: ") and "--name run --resume" in printed.out
    records = metrics(folder)[3:]
    assert [record.get("skipped") for record in records] == [None, None, 1.0, 1.0]
    assert [record["optimizer_step"] for record in records] == [1, 2, 2, 2]
    assert len(list((folder / "skipped").iterdir())) == 2
    assert max(path.name for path in (folder / "checkpoints").iterdir()) == "step-00000007"
    # With gradients as they should be it goes on to the end.
    assert main(words("run", "--resume")) == 0
    assert json.loads((folder / "summary.json").read_text())["result"].startswith("held-out reward")
