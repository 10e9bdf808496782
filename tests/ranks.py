"""Processes of a test that runs over several ranks: forked from one that has imported what they need, once for all."""

import gc
import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Importing takes longer than the tests. Nothing here starts a thread, as JAX would.
IMPORTED = [
    "torch.distributed.fsdp",
    "torch._dynamo.backends.debugging",
    "torch._functorch.aot_autograd",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
]


def results(rank: Callable[..., None], count: int, folder: Path) -> list[tuple[Any, ...]]:
    """What each `rank(number, address, queue)` put, `(number, …)`, in the order of their numbers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    queue = context.Queue()
    processes = [context.Process(target=rank, args=(n, f"file://{folder}/store", queue)) for n in range(count)]
    for process in processes:
        process.start()
    received = sorted((queue.get(timeout=300) for _ in processes), key=lambda message: message[0])
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return received


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
