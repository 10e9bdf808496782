"""Runs a command until its end or the end of whoever started the guard: ``python -I -S guard.py OPTIONS COMMAND...``.

The guard leads a session in which the command and all that the command starts live. So nothing of them is left, however
the process that started the guard ends. OPTIONS are the keyword arguments of ``main`` as JSON. The program imports the
standard library alone, since a guard starts with every child process.
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
from collections.abc import Callable, Sequence

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK = 2.0
"""Seconds between two looks at the shared memory of the session."""
PR_SET_PDEATHSIG = 1
SHARED = "/dev/shm/psm_"
"""Python's names of shared memory, by which vLLM's processes speak. The files outlive a killed server."""


def main(
    command: list[str],
    *,
    control: int,
    parent: int,
    grace: float,
    by_stdin: bool,
    descriptors: Sequence[int],
    record: str | None,
    cores: Sequence[int],
    shared_memory: bool,
) -> None:
    """Run the command to its end; ``control`` gets a line with its process id and one with its exit status.

    When the other end of ``control`` is closed or ``parent`` is gone, the command is asked to end, by SIGTERM or by the
    end of its standard input, and killed ``grace`` seconds later. The other arguments are those of ``children.Child``.
    """
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # A parent that ignores SIGCHLD hands that down, and no child's status could be read.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if record is not None:
        lock = os.open(f"{record}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Another guard has the command. The process that started this guard sees that no status was written.
            os.kill(os.getpid(), signal.SIGKILL)
    if cores:
        os.sched_setaffinity(0, cores)
    status, segments = 127, set[str]()
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if by_stdin else subprocess.DEVNULL,
            pass_fds=descriptors,
            preexec_fn=_prepare(os.getpid()),
        )
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", file=sys.stderr, flush=True)
        _tell(control, -1)
    else:
        # The other end of a child's socket sees the end of the child, and not that of the guard.
        for descriptor in descriptors:
            os.close(descriptor)
        _tell(control, child.pid)
        status = _watched(child, control, parent, grace, segments if shared_memory else None)
    if record is not None:
        _write(f"{record}.exit", status)
    _tell(control, status)
    # Python's own process that removes shared memory is killed with the session.
    for segment in segments:
        with contextlib.suppress(OSError):
            os.unlink(segment)
    end_session(os.getpid())


def end_session(leader: int) -> None:
    """Kill all processes of a session, those in process groups of their own too; the calling process comes last."""
    killed = {leader}
    if leader != os.getpid():
        _kill_group(leader)
    while processes := _processes(leader) - killed:
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        killed |= processes
    if leader == os.getpid():
        _kill_group(leader)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _watched(
    child: "subprocess.Popen[bytes]", control: int, parent: int, grace: float, segments: set[str] | None
) -> int:
    """Wait for the child, and ask it to end when the parent is gone; returns its exit status.

    ``segments`` gets the names of shared memory that the session has mapped.
    """
    # Not ``select``, which takes no descriptor above 1023: this one has the number that the parent gave.
    poller = select.poll()
    poller.register(control, select.POLLIN)
    deadline, last_look = None, time.monotonic()
    while child.poll() is None:
        if segments is not None and time.monotonic() > last_look + LOOK:
            segments |= _shared_memory()
            last_look = time.monotonic()
        if deadline is not None:
            if time.monotonic() > deadline:
                child.kill()
                child.wait()
            time.sleep(0.02)
        # Other copies of the parent's end may be open in its forks.
        elif poller.poll(50) or os.getppid() != parent:
            deadline = time.monotonic() + grace
            if child.stdin is None:
                child.terminate()
            else:
                child.stdin.close()
    return child.returncode


def _prepare(guard: int) -> Callable[[], None]:
    def prepare() -> None:
        for number in IGNORED:
            signal.signal(number, signal.SIG_DFL)
        if sys.platform == "linux":
            # Somebody may kill the guard alone.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)

    return prepare


def _tell(control: int, number: int) -> None:
    with contextlib.suppress(OSError):  # the parent is gone
        os.write(control, f"{number}\n".encode())


def _write(file: str, status: int) -> None:
    """Write the status, whole or not at all."""
    with open(f"{file}.tmp", "w") as stream:
        json.dump({"code": status}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(f"{file}.tmp", file)


def _processes(session: int) -> set[int]:
    """Processes of a session that the system lists."""
    processes: set[int] = set()
    for process in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError):  # it has just ended
            if os.getsid(int(process)) == session:
                processes.add(int(process))
    return processes


def _shared_memory() -> set[str]:
    """The files of shared memory that a process of this session has mapped."""
    files: set[str] = set()
    for process in _processes(os.getpid()):
        with contextlib.suppress(OSError), open(f"/proc/{process}/maps") as maps:  # it may just have ended
            files |= {line[line.index(SHARED) :].split()[0] for line in maps if SHARED in line}
    return files


if __name__ == "__main__":
    main(sys.argv[2:], **json.loads(sys.argv[1]))
