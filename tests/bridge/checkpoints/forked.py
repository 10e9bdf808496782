"""Jobs of several ranks, forked from one process that has imported what they need. A rank may be killed, or all.

python -m tests.bridge.checkpoints.forked      # reads jobs from standard input, a JSON line each
"""

import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[3]
DEADLINE = 90.0


class Jobs:
    """The other end: ``jobs.run(function, *arguments)`` runs ``job.function(*arguments)`` in every rank."""

    def __init__(self, folder):
        self._folder, self._number = folder, 0
        path = os.pathsep.join([str(ROOT), *sys.path])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "tests.bridge.checkpoints.forked"]
        pipe = subprocess.PIPE
        self._template = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=ROOT)

    def run(self, function, *arguments, ranks=2, kill_after=None):
        """Exit status of every rank (−9 for a kill), and what they printed."""
        self._number += 1
        outputs = [str(self._folder / f"job-{self._number}-rank-{rank}.txt") for rank in range(ranks)]
        job = {"function": function, "arguments": list(map(str, arguments)), "outputs": outputs}
        assert self._template.stdin is not None and self._template.stdout is not None
        self._template.stdin.write(json.dumps(job | {"kill_after": kill_after}) + "\n")
        self._template.stdin.flush()
        statuses = json.loads(self._template.stdout.readline())
        return statuses, "\n".join(Path(output).read_text() for output in outputs)

    def close(self):
        assert self._template.stdin is not None and self._template.stdout is not None
        self._template.stdin.close()
        assert self._template.wait(30) == 0
        self._template.stdout.close()


def main():
    job_module = importlib.import_module("tests.bridge.checkpoints.job")
    warnings.filterwarnings("ignore", message=r"os.fork\(\) was called", category=RuntimeWarning)
    for line in sys.stdin:
        job = json.loads(line)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks = range(len(job["outputs"]))
        pids = [rank_process(rank, port, getattr(job_module, job["function"]), job) for rank in ranks]
        print(json.dumps(statuses_of(pids, job["kill_after"])), flush=True)


def rank_process(rank, port, function, job):
    pid = os.fork()
    if pid:
        return pid
    with open(job["outputs"][rank], "w") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    world = str(len(job["outputs"]))
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    status = 1
    try:
        function(*job["arguments"])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def statuses_of(pids, kill_after):
    """Wait for all; one that does not end is killed and has the status 124."""
    began, statuses, late = time.monotonic(), {}, set()
    while len(statuses) < len(pids):
        for pid in set(pids) - statuses.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = 124 if pid in late else os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - began
        if seconds > DEADLINE or (kill_after is not None and seconds > kill_after):
            late |= (set(pids) - statuses.keys()) if seconds > DEADLINE else set()
            for pid in random.sample(pids, len(pids)):
                if pid not in statuses:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [statuses[pid] for pid in pids]


if __name__ == "__main__":
    main()
