"""Commands that a test starts in a process of their own, and that may kill themselves."""

from tests.support import warm

# A process of the command, which dies a number of seconds after it touched the run's record for the nth time; of a
# negative number it lives. Counted so, a kill falls into a step however busy the machine is.
COMMAND = """
import os, signal, sys, threading, time
from pathlib import Path
from rl_tools import cli
from rl_train.policy_configs import quickstart
from rl_train.policy import run_policy

def touched():
    return record.stat().st_mtime_ns if record.exists() else None

def die():
    before = first
    for _ in range(touches):
        while touched() == before:
            time.sleep(0.002)
        before = touched()
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)

touches, delay, record = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
first = touched()
if touches >= 0:
    threading.Thread(target=die, daemon=True).start()
sys.exit(cli.main(sys.argv[4:]))
"""


def start(words, touches=-1, delay=0.0, record="."):
    return warm.start("-c", COMMAND, str(touches), str(delay), str(record), *map(str, words))


def lines(folder):
    return (folder / "metrics.jsonl").read_text("utf-8").splitlines()


def ended(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err
