"""Processes of tests: ranks above all, forked from one process that has imported what they need, once for all."""

import faulthandler
import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any

from tests.support import warm

CURRENT = "PYTEST_CURRENT_TEST"
LIMIT = 300.0
"""Seconds until ranks that do not answer are asked where they are."""

# Importing takes longer than the tests. Nothing here starts a thread, as JAX does when it computes.
IMPORTED = [
    *warm.IMPORTED,
    "pytest",
    "torch._dynamo.backends.debugging",
    "torch._functorch.aot_autograd",
    "transformers.masking_utils",
    "transformers.models.llama.modeling_llama",
]


def forking() -> Any:
    """The context of multiprocessing whose processes begin with everything imported.

    A process has one such server, which imports what its first user names: a list of another user would be lost.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def results(rank: Callable[..., None], count: int, folder: Path) -> list[tuple[Any, ...]]:
    """What each `rank(number, address, queue)` put, `(number, …)`, in the order of their numbers."""
    context = forking()
    queue = context.Queue()
    traces = [folder / f"stacks of rank {n}.txt" for n in range(count)]
    test = os.environ.get(CURRENT, "")
    processes = [
        context.Process(target=_watched, args=(rank, str(trace), test, n, f"file://{folder}/store", queue))
        for n, trace in enumerate(traces)
    ]
    for process in processes:
        process.start()
    received: list[tuple[Any, ...]] = []
    deadline = time.monotonic() + LIMIT
    while len(received) < count:
        try:
            received.append(queue.get(timeout=1.0))
        except Empty:
            answered = {message[0] for message in received}
            lost = [n for n, process in enumerate(processes) if process.exitcode is not None and n not in answered]
            if time.monotonic() > deadline or (lost and queue.empty()):
                raise AssertionError(_what_they_do(processes, traces, lost, received)) from None
    for process in processes:
        process.join(LIMIT)
        assert process.exitcode == 0
    return sorted(received, key=lambda message: message[0])


def _watched(rank: Callable[..., None], trace: str, test: str, *arguments: Any) -> None:
    """A rank that writes the stacks of all its threads when it gets SIGUSR1, or crashes."""
    os.environ[CURRENT] = test  # the server's is that of the test which began it
    with open(trace, "w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file)
        rank(*arguments)


def _what_they_do(processes: list[Any], traces: list[Path], lost: list[int], received: list[tuple[Any, ...]]) -> str:
    """Why there is no answer: which ranks have ended, and where the others are."""
    for process in processes:
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1.0)  # the stacks are written
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    lines = [f"ranks {lost} ended without an answer" if lost else f"no answer within {LIMIT:g} s"]
    lines += [f"answers so far: {received}"]
    for code, trace in zip(codes, traces, strict=True):
        state = "runs" if code is None else f"ended with exit status {code}"
        lines += [f"--- {trace.name}; {state}", trace.read_text() if trace.exists() else "has not begun"]
    return "\n".join(lines)


def found_by_ranks(rank: Callable[..., None], count: int, folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """``results`` of ranks that put a dictionary each; a traceback in place of one is the test's failure."""
    received = results(rank, count, folder)
    for _, found in received:
        assert isinstance(found, dict), found
    return received  # type: ignore[return-value]


def as_rank(work: Callable[[], dict[str, Any]], count: int, number: int, address: str, queue: Any) -> None:
    """The whole of one of ``count`` ranks of a gloo group: put what ``work`` finds, or its traceback."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=address, rank=number, world_size=count)
    torch.set_num_threads(1)
    gc.freeze()  # the collections of engines that end need not look at what was imported
    try:
        queue.put((number, work()))
    except BaseException:
        queue.put((number, traceback.format_exc()))
        raise
    finally:
        dist.destroy_process_group()
