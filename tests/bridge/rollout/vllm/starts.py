"""Engines of vLLM that start and end in this process within 0.3 s of CPU time, in place of 4.4 s."""

# pyright: reportMissingImports=false

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def quick_starts() -> Iterator[None]:
    """Inside, vLLM walks neither over all that Python holds, eight times an engine, nor over all modules' names.

    What is here before the first engine is frozen once, and what engines make is collected as ever. Kernels for CPUs
    are bound by the first engine of a process; the ones after it find them bound.
    """
    # What a first engine imports is most of what is walked over.
    import vllm.model_executor.models.qwen2
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.triton_utils import dispatcher

    register = dispatcher.register_kernels

    def register_new(overrides):
        if new := {name: kernel for name, kernel in overrides.items() if name not in dispatcher._registry}:
            register(new)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "register_kernels", register_new)
        gc.collect()
        gc.freeze()
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
    gc.unfreeze()
