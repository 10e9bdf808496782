"""A rank of torchrun that dies while rollouts run ahead ends the run, and nothing of the ledger is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_bridge.checkpoints.restoring import read_driver
from tests.support.results import metrics

ROOT = Path(__file__).parents[3]
REWARD = """
import os
from pathlib import Path

DRIVER = Path(__file__).with_name("driver")
DRIVER.write_text(str(os.getpid()))


def even_digits(completion, row):
    return sum(c in "02468" for c in completion) + 0.1 * len(completion)
"""
OPTIONS = {
    "--asynchronous.max-staleness": 2,
    "--asynchronous.tokens-beside": 4,
    "--asynchronous.round-tokens": 2,
    "--sft.steps": 1,
    "--policy.steps": 5,
    "--policy.updates-per-step": 1,
    "--policy.sampling.max-new-tokens": 12,
    "--policy.evaluate-every": 5,
    "--held-out": 8,
    "--checkpoint-every": 1,
}


@pytest.fixture
def words(tmp_path, arguments):
    (tmp_path / "reward.py").write_text(REWARD)
    options = OPTIONS | {"--reward": f"{tmp_path / 'reward.py'}:even_digits"}
    return lambda *more: arguments("run", "--asynchronous.partial", *more, **options)


def start(words):
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "bridge"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    launch = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "-m", "rl_tools.cli"]
    command = [sys.executable, *launch, *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def parent(process):
    [line] = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("PPid:")]
    return int(line.split()[1])


def rank_beside(driver):
    """The other rank of the job."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != driver and parent(folder.name) == parent(driver):
                found.append(int(folder.name))
        except FileNotFoundError:
            continue  # it has ended
    [rank] = found
    return rank


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dead_rank_ends_the_run_which_goes_on_from_its_ledger(tmp_path, words):
    folder, deadline = tmp_path / "run", time.monotonic() + 300
    process = start(words())
    record = folder / "metrics.jsonl"
    while not (record.exists() and len(record.read_text().splitlines()) >= 3):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1][-3000:]
        time.sleep(0.01)
    driver = int((tmp_path / "driver").read_text())
    os.kill(rank_beside(driver), signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "ended" in err and "--resume" in out + err, err[-3000:]
    newest = max((folder / "checkpoints").iterdir())
    ledger = read_driver(newest)["state"]["state"]["rollouts"]["ledger"]
    assert ledger["groups"], "the checkpoint has requests on their way"
    process = start(words("--resume"))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    ledger = read_driver(max((folder / "checkpoints").iterdir()))["state"]["state"]["rollouts"]["ledger"]
    assert (ledger["opened"], ledger["finished"], ledger["groups"]) == (20, {"trained": 80}, [])
    steps = [record["step"] for record in metrics(folder) if record["stage"] == "policy"]
    assert steps == list(range(5))
