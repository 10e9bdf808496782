"""What a checkpoint does in the processes of the workers: functions that an executor runs over hosts."""

import threading
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakKeyDictionary

from rl_bridge.checkpoints.errors import CheckpointError
from rl_bridge.checkpoints.random_states import random_states, set_random_states
from rl_bridge.checkpoints.reading import read_engine, read_random
from rl_bridge.checkpoints.snapshot import HostBuffers
from rl_bridge.checkpoints.writing import Request, Share, write
from rl_bridge.executors.host import Host

PURPOSE = "checkpoint"


class _Saver:
    """Of one host: its buffers, the share that is staged, the thread that writes."""

    def __init__(self) -> None:
        self.buffers = HostBuffers()
        self.share: Share | None = None
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def write(self) -> None:
        assert self.share is not None
        try:
            write(self.share)
        except Exception as error:
            self.error = error


_savers: WeakKeyDictionary[Host, _Saver] = WeakKeyDictionary()


def stage(host: Host, request: Request) -> None:
    """Copy the states of this slot's workers to host memory: all that a step has to wait for.

    An error in one slot shows here, before any of them waits for the others.
    """
    saver = _savers.setdefault(host, _Saver())
    assert saver.thread is None
    saver.buffers.only(request.engines)
    saver.share = Share(
        request,
        ranks={name: host.workers[engine].rank for name, engine in _here(host, request.engines).items()},
        snapshots={
            name: saver.buffers.snapshot(name, host.workers[engine].module)
            for name, engine in _here(host, request.engines).items()
        },
        random=random_states(host.device),
        group=host.group(request.slots, "gloo", purpose=PURPOSE),
    )


def start(host: Host) -> None:
    """Begin to write what is staged, in a thread."""
    saver = _savers[host]
    saver.thread = threading.Thread(target=saver.write, name="checkpoint", daemon=True)
    saver.thread.start()


def finish(host: Host, timeout: float) -> None:
    """Wait until what was begun is written.

    Raises:
        CheckpointError: it was not written, or not within ``timeout`` seconds.
    """
    saver = _savers[host]
    assert saver.thread is not None and saver.share is not None
    saver.thread.join(timeout)
    if saver.thread.is_alive():
        raise CheckpointError(f"{saver.share.request.path} was not written within {timeout} s")
    error, saver.thread, saver.share, saver.error = saver.error, None, None, None
    if error is not None:
        raise error


def forget(host: Host) -> None:
    """Let go of the buffers of a run that is over."""
    saver = _savers.get(host)
    if saver is not None and saver.thread is None:
        del _savers[host]


def leave_mark(host: Host, path: Path) -> str:
    """Write a small file for the driver to find; why that cannot be, if it cannot."""
    try:
        path.touch()
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def load(host: Host, path: Path, engines: Mapping[str, str]) -> None:
    """Give this slot's workers their states, and the process the random states that its slot had."""
    for name, engine in _here(host, engines).items():
        read_engine(path, name, host.workers[engine].module)
    states = read_random(path, host.slot)
    if states is not None:
        set_random_states(states, host.device)


def _here(host: Host, engines: Mapping[str, str]) -> dict[str, str]:
    return {name: engines[name] for name in sorted(engines) if engines[name] in host.workers}
