"""Checkpoints: the driver asks the workers to write and read them, and knows which is the newest whole one."""

import base64
import random
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from rl_bridge.checkpoints.restoring import read_driver, read_engine, read_random
from rl_bridge.checkpoints.writing import (
    DRIVER,
    RANDOM,
    CheckpointError,
    HostBuffers,
    Request,
    Share,
    take_apart,
    write,
)
from rl_bridge.common import step_folders
from rl_bridge.common.terminal import say
from rl_bridge.engines.engine import Engine
from rl_bridge.executors import Executor, LocalExecutor
from rl_bridge.executors.host import Host

# The global random states of a process, as JSON has them.


def random_states(device: torch.device | None = None) -> dict[str, Any]:
    """States of Python's, NumPy's and torch's global generators; with a CUDA ``device`` that of its generator too."""
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = numpy_state
    version, internal, gauss = random.getstate()
    cuda = device if device is not None and device.type == "cuda" else None
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": None if cuda is None else _text(torch.cuda.get_rng_state(cuda)),
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }


def set_random_states(states: dict[str, Any], device: torch.device | None = None) -> None:
    """Set the generators to what ``random_states`` read. CUDA's is left alone on a machine without the device."""
    torch.set_rng_state(_tensor(states["torch"]))
    if states["cuda"] is not None and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(_tensor(states["cuda"]), device)
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


# The part of the workers' processes: functions that an executor runs over hosts.

PURPOSE = "checkpoint"


class _Saver:
    """The writer of one host: its buffers, the share that is staged, the thread that writes."""

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
    saver.error = None
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
    """Wait until what was begun is written. A driver that did not see the end, as after Ctrl-C, asks again.

    Raises:
        CheckpointError: it was not written, or not within ``timeout`` seconds.
    """
    saver = _savers[host]
    if saver.thread is not None:
        assert saver.share is not None
        saver.thread.join(timeout)
        if saver.thread.is_alive():
            raise CheckpointError(f"{saver.share.request.path} was not written within {timeout} s")
        saver.thread, saver.share = None, None
    if saver.error is not None:
        raise saver.error


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


# The driver's part.


class Checkpointer:
    """Checkpoints of one run in one folder, which every worker and the driver see.

    A checkpoint has the states of all engines given to ``save``, the random states of all their processes, and the
    driver's own state. It is whole or it is not there: ``step-N.tmp`` becomes ``step-N`` when everything is on the
    disk. One process at a time writes to a run's folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        asynchronous: bool = True,
        timeout: float = 3600.0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """``keep``: how many stay. ``asynchronous``: ``save`` returns when the states are copied to host memory.

        ``timeout``: seconds that writing one may take. ``report`` gets what the user should know (default: stderr).
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.folder = folder
        self._keep, self._asynchronous, self._timeout = keep, asynchronous, timeout
        self._report = report or partial(say, error=True)
        self._writers: tuple[Executor, tuple[int, ...]] | None = None
        self._copied_on: tuple[Executor, tuple[int, ...]] | None = None
        self._damaged: list[Path] = []
        self._whole: set[Path] = set()
        self._alone = LocalExecutor("cpu")

    def save(
        self, step: int, engines: Mapping[str, Engine], driver: Mapping[str, Any], *, pinned: tuple[int, ...] = ()
    ) -> Path:
        """Write ``folder/step-N``. A save that is still being written is waited for first, and its error raised here.

        ``engines``: name in the checkpoint → engine; all of one executor. ``driver``: what else the run depends on.
        ``pinned``: steps whose checkpoints stay, however many newer ones there are.

        Raises:
            CheckpointError: the one before, or (not asynchronous) this one, was not written.
            TypeError: there is something in a state that no checkpoint holds.
        """
        self.wait()
        self._set_damaged_aside()
        executor, slots = self._place(engines)
        path = self.path(step)
        names = {name: engine.name for name, engine in engines.items()}
        structure, tensors = take_apart({"state": dict(driver), "random": random_states()})
        state = structure, {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        arguments = {
            slot: (Request(path, self._keep, pinned, names, slots, state if slot == slots[0] else None),)
            for slot in slots
        }
        self._copied_on = executor, slots
        executor.call(stage, arguments, what=f"snapshot for {path.name}", timeout=self._timeout)
        self._writers = executor, slots  # before the start, whose end Ctrl-C may keep from this process
        executor.call(start, dict.fromkeys(slots, ()), what=f"start of {path.name}")
        if not self._asynchronous:
            self.wait()
        return path

    def wait(self) -> None:
        """Wait until the last save is on the disk.

        Raises:
            CheckpointError: it was not written; the message says why, and which checkpoint is the newest.
        """
        if self._writers is None:
            return
        executor, slots = self._writers
        arguments = dict.fromkeys(slots, (self._timeout,))
        try:
            executor.call(finish, arguments, what="writing a checkpoint", timeout=self._timeout + 60)
            self._writers = None
        except Exception as error:
            self._writers = None
            reason = error.__cause__ if isinstance(error.__cause__, CheckpointError) else error
            newest = self.newest()
            older = "there is no older one" if newest is None else f"the newest is {newest}"
            raise CheckpointError(f"{reason}; {older}") from error

    def close(self) -> None:
        """``wait``, and let go of the host memory that snapshots were copied to.

        Raises:
            CheckpointError: as ``wait``; the memory is let go of all the same.
        """
        try:
            self.wait()
        finally:
            place, self._copied_on = self._copied_on, None
            if place is not None and not place[0].stopped and not place[0].dead():
                place[0].call(forget, dict.fromkeys(place[1], ()), what="end of checkpoints")

    def path(self, step: int) -> Path:
        """Path of the checkpoint ``step-N``."""
        return step_folders.path_of(self.folder, step)

    def newest(self) -> Path | None:
        """The newest checkpoint by its name, which only a whole one gets. Damage that came later is not looked for."""
        return next(iter(reversed(step_folders.checkpoints(self.folder))), None)

    def latest(self) -> Path | None:
        """The newest whole checkpoint; None if there is none at all. What is damaged is reported and passed over.

        Raises:
            ValueError: there are checkpoints, and all of them are damaged; or one is of a newer version's format.
        """
        self._damaged, reasons = [], []
        for path in reversed(step_folders.checkpoints(self.folder)):
            reason = step_folders.damage(path)
            if reason is None:
                self._whole.add(path)
                if reasons:
                    self._report(f"going on from {path}, because {'; '.join(reasons)}")
                return path
            self._damaged.append(path)
            reasons.append(reason)
        if reasons:
            raise ValueError(
                f"no checkpoint of {self.folder} is whole: {'; '.join(reasons)}. Begin again under another --name, or "
                "bring a whole checkpoint back from a copy"
            )
        return None

    def read(self, path: Path) -> dict[str, Any]:
        """The driver's state in a checkpoint.

        Raises:
            ValueError: the checkpoint is damaged; the message names the file.
        """
        self._require_whole(path)
        return read_driver(path)["state"]

    def load(self, path: Path, engines: Mapping[str, Engine]) -> dict[str, Any]:
        """Give the engines and the random generators of every process their states back; returns the driver's.

        On the mesh that the checkpoint was made on everything goes on bit for bit. On another mesh each worker reads
        what its share needs; a process that the checkpoint does not know keeps its random states.

        Raises:
            ValueError: the checkpoint is damaged, or of another model.
        """
        self._require_whole(path)
        executor, slots = self._place(engines)
        names = {name: engine.name for name, engine in engines.items()}
        arguments = dict.fromkeys(slots, (path, names))
        executor.call(load, arguments, what=f"loading {path.name}", timeout=self._timeout)
        driver = read_driver(path)
        set_random_states(driver["random"])
        return driver["state"]

    def require_shared(self, engines: Mapping[str, Engine]) -> None:
        """Refuse a folder that is not the same one on every host of these engines, before anything is trained.

        Raises:
            ValueError: what a host wrote there is not what the driver finds; with the hosts' names.
        """
        executor, slots = self._place(engines)
        if not engines or executor.name == "local":
            return
        hosts_of = {slot.node: slot.index for slot in reversed(executor.slots) if slot.index in slots}
        self.folder.mkdir(parents=True, exist_ok=True)
        names = {slot: f"seen-by-{slot}-{secrets.token_hex(8)}" for slot in hosts_of.values()}
        arguments = {slot: (self.folder / name,) for slot, name in names.items()}
        answers = executor.call(leave_mark, arguments, what="a look at the checkpoints' folder")
        wrong = []
        for node, slot in sorted(hosts_of.items()):
            mark = self.folder / names[slot]
            if not mark.exists():
                wrong.append(f"{node}{f' ({answers[slot]})' if answers[slot] else ''}")
            mark.unlink(missing_ok=True)
        if wrong:
            raise ValueError(
                f"checkpoints need a folder that all hosts share, and {self.folder} is not that: the driver does not "
                f"find there what was written on {', '.join(wrong)}. Give the run a folder on a file system of all "
                "hosts, by its absolute path"
            )

    def _place(self, engines: Mapping[str, Engine]) -> tuple[Executor, tuple[int, ...]]:
        """The slots of the engines' workers; without an engine the driver itself."""
        for name in engines:
            if name in (DRIVER, RANDOM) or not name.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"{name!r} cannot be an engine's name in a checkpoint")
            engines[name].require_in_step("checkpoint")
        if not engines:
            return self._alone, (0,)
        executor, *others = {id(engine.executor): engine.executor for engine in engines.values()}.values()
        if others:
            raise ValueError(f"the engines {', '.join(engines)} of one checkpoint need one executor")
        return executor, tuple(sorted({slot for engine in engines.values() for slot in engine.slots}))

    def damage_of(self, path: Path) -> str | None:
        """The fault of a checkpoint at this moment; None if it is whole."""
        if not path.is_dir():
            return f"{path} is missing"
        if (reason := step_folders.damage(path)) is None:
            self._whole.add(path)
        return reason

    def _require_whole(self, path: Path) -> None:
        if path not in self._whole and (reason := self.damage_of(path)) is not None:
            raise ValueError(f"{path} cannot be read: {reason}")

    def _set_damaged_aside(self) -> None:
        """Before a run goes on from an older checkpoint: a damaged one must not count as newer than what it writes."""
        for path in self._damaged:
            self._report(f"{path} is now {step_folders.set_aside(path).name}")
        self._damaged = []
