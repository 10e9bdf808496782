"""Runs a command until its end or the end of whoever started this: ``watcher.py DESCRIPTOR COMMAND...``.

A script without imports of this package, since it starts with every engine. It leads a process group, in which the
command and all that the command starts live: so nothing of them is left, however the driver ends.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE = 10.0
"""Seconds between the request to end and the end."""
LOOK = 2.0
"""Seconds between two looks at the shared memory of the group."""
SHARED = "/dev/shm/psm_"
"""Python's names of shared memory, by which vLLM's processes speak. The files outlive a killed server."""


def main(control: int, command: list[str]) -> None:
    """Wait for the command, or for the other end of ``control`` to be closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    mine = os.getpid()

    def with_this_process() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: somebody may kill this process alone
        if os.getppid() != mine:
            os._exit(1)

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=with_this_process)
    os.write(control, f"{child.pid}\n".encode())
    segments: set[str] = set()
    looked = time.monotonic()
    while child.poll() is None:
        if time.monotonic() > looked + LOOK:
            segments |= shared_memory()
            looked = time.monotonic()
        if select.select([control], [], [], 0.05)[0]:
            child.terminate()
            deadline = time.monotonic() + GRACE
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            break
    else:
        os.write(control, f"{child.returncode}\n".encode())
    # Python's own process that removes shared memory is killed with the group.
    for segment in segments:
        with contextlib.suppress(OSError):
            os.unlink(segment)
    os.killpg(0, signal.SIGKILL)


def shared_memory() -> set[str]:
    """The files of shared memory that a process of this group has mapped."""
    found: set[str] = set()
    for process in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if os.getpgid(int(process)) == os.getpgrp():
                with open(f"/proc/{process}/maps") as maps:
                    found |= {line[line.index(SHARED) :].split()[0] for line in maps if SHARED in line}
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
