"""Between a tuner and a trial: a program of its own that ends the trial when the tuner is gone.

``python guard.py LOCK EXIT GRACE CORES COMMAND …``. The standard input is a pipe that the tuner holds. When the pipe
closes, the trial gets SIGTERM, so that it writes a checkpoint, and SIGKILL after GRACE seconds. EXIT gets the trial's
status, whoever is there to read it. LOCK is held while the trial may run. Only the standard library is imported.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(lock: str, file: str, grace: float, cores: str, command: list[str]) -> None:
    """Run the command to its end."""
    held = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    guard = os.getpid()

    def prepare() -> None:
        for number in IGNORED:
            signal.signal(number, signal.SIG_DFL)
        if sys.platform == "linux":
            # Somebody may kill this process alone.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        trial = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=prepare)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", file=sys.stderr, flush=True)
        write(file, 127)
        return
    deadline = None
    while trial.poll() is None:
        if deadline is None:
            if select.select([0], [], [], 0.05)[0] and not os.read(0, 1):
                deadline = time.monotonic() + grace
                os.killpg(0, signal.SIGTERM)
        elif time.monotonic() > deadline:
            trial.kill()
            trial.wait()
        else:
            time.sleep(0.05)
    write(file, trial.returncode)
    # What the trial has left of its own processes; this one too.
    os.killpg(0, signal.SIGKILL)


def write(file: str, code: int) -> None:
    """The status, whole or not at all."""
    with open(f"{file}.tmp", "w") as stream:
        json.dump({"code": code}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(f"{file}.tmp", file)


if __name__ == "__main__":
    with contextlib.suppress(BlockingIOError):  # another guard has the trial; the tuner sees that nothing was written
        main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4], sys.argv[5:])
