"""An engine of vLLM that is cut over several processes, its tensor ranks, under the engine in this process.

Every rank draws every token by itself, so the hook of the sampler works in each; the first one's notes are read.
"""

# pyright: reportMissingImports=false

import logging
import os
import signal
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from rl_bridge.common.root_cause import root_cause
from rl_bridge.rollout.inside_vllm.plugin import ERRORS
from rl_bridge.rollout.inside_vllm.sampler_hooks import Draws


class RankDied(RuntimeError):
    """A process of an engine is gone, and with it the engine: the message names the rank."""


BIND = "VLLM_CPU_OMP_THREADS_BIND"
logger = logging.getLogger(__name__)


def binding(ranks: int) -> dict[str, str]:
    """The variable without which vLLM opens no more ranks than this machine has NUMA nodes, on a CPU.

    By itself vLLM binds the threads of each rank to a node of its own. What a user has set stays.
    """
    if ranks == 1 or BIND in os.environ or torch.cuda.is_available() or ranks <= (nodes := numa_nodes()):
        return {}
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    logger.info("%d ranks of vLLM on %d NUMA nodes: %s=nobind, %s threads each", ranks, nodes, BIND, threads)
    return {BIND: "nobind"} | ({} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": threads})


def numa_nodes(status: Path = Path("/proc/self/status")) -> int:
    """How many NUMA nodes this process may use; 1 where the system does not say."""
    lines = status.read_text().splitlines() if status.is_file() else []
    for line in lines:
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            ends = [[int(end) for end in part.split("-")] for part in value.strip().split(",")]
            return sum(end[-1] - end[0] + 1 for end in ends)
    return 1


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Inside, this process has these environment variables, without those that are None; then the earlier ones."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def opening() -> Iterator[None]:
    """Inside, the error that ends a rank at its start is in the message: vLLM's says only that there was one.

    Raises:
        RuntimeError: with the last line of the rank's traceback.
    """
    with tempfile.NamedTemporaryFile(prefix="rl_fn-vllm-") as file, environment({ERRORS: file.name}):
        try:
            yield
        except Exception as error:
            if cause := root_cause(Path(file.name).read_text(errors="replace")):
                raise RuntimeError(f"a rank of the engine did not start: {cause}") from error
            raise


class RankDraws(Draws):
    """``Draws`` of an engine whose ranks are processes of their own: it works in each, and is read from the first."""

    def attach(self, engine: Any) -> None:
        """Work in this engine from now on."""
        self._engine = engine
        engine.collective_rpc("rl_fn_begin")
        step = engine.step

        def step_and_note() -> Any:
            outputs = step()
            # Read at once: the notes of an engine that dies are gone, and its outputs may be given out later.
            if ended := [output.request_id for output in outputs if output.finished]:
                self._note(ended)
            return outputs

        engine.step = step_and_note

    def take_allowed(self, request_id: str, count: int) -> list[array]:
        """The ids that were allowed at each draw; those of a request that was withdrawn are read now."""
        if request_id not in self._allowed:
            self._note([request_id])
        return super().take_allowed(request_id, count)

    def _note(self, names: list[str]) -> None:
        for name, rows in self._engine.collective_rpc("rl_fn_noted", args=(names,))[0].items():
            self._allowed[name] = [array("i", ids) for ids in rows]

    def forget(self, request_id: str) -> None:
        """Drop the notes of a request that ended otherwise, in every rank."""
        super().forget(request_id)
        with suppress(RankDied):
            self._engine.collective_rpc("rl_fn_noted", args=([request_id],))


class Watch:
    """A watch over the processes of an engine's ranks: the engine's errors name the dead one, and all are ended."""

    def __init__(self, engine: Any) -> None:
        """Watch from now on."""
        self.processes = [worker.proc for worker in engine.model_executor.workers]
        self._died: list[str] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._note, daemon=True, name="vLLM's ranks")
        self._thread.start()
        for name in ("step", "collective_rpc"):
            setattr(engine, name, partial(self._named, getattr(engine, name)))

    def close(self) -> None:
        """After the engine was told to end: returns when no process of it is left."""
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()

    def closing(self) -> None:
        """Let processes end from now on without being counted as dead."""
        self._closing.set()

    def _note(self) -> None:
        ended = wait([process.sentinel for process in self.processes])
        if self._closing.is_set():
            return
        rank, process = next((rank, one) for rank, one in enumerate(self.processes) if one.sentinel in ended)
        deadline = time.monotonic() + 5
        while (code := process.exitcode) is None and time.monotonic() < deadline:
            time.sleep(0.01)  # vLLM's own watch may have taken the status, and not noted it yet
        how = "" if code is None else f" by {signal.Signals(-code).name}" if code < 0 else f" with exit status {code}"
        self._died.append(f"rank {rank} of {len(self.processes)} of the engine (process {process.pid}) ended{how}")

    def _named(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._died:
            raise RankDied(self._died[0])
        try:
            return call(*args, **kwargs)
        except Exception as error:
            # vLLM may have seen the end first.
            if not all(process.is_alive() for process in self.processes):
                self._thread.join(10)
            if self._died:
                raise RankDied(self._died[0]) from error
            raise
