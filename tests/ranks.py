"""Processes of a test that runs over several ranks: forked from one that has imported what they need, once for all."""

import multiprocessing
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
