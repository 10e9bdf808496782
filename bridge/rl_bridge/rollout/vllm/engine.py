"""An engine of vLLM in this process, opened from a folder in Hugging Face format, and what it really is."""

# pyright: reportMissingImports=false

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from rl_bridge.rollout.vllm import keep_alive
from rl_bridge.rollout.vllm.in_server import EXTENSION
from rl_bridge.rollout.vllm.options import VLLMOptions
from rl_bridge.rollout.vllm.own_classes import Changed, classes_kept, take
from rl_bridge.rollout.vllm.ranks import BIND, Watch, binding, opening
from rl_bridge.rollout.vllm.worlds import world_of_one

WORLDS: WeakKeyDictionary[LLMEngine, list[dist.ProcessGroup]] = WeakKeyDictionary()
"""Torch's process group of each engine."""

WATCHES: WeakKeyDictionary[LLMEngine, Watch] = WeakKeyDictionary()
"""Over the ranks of each engine that has several."""


@dataclass(frozen=True)
class EngineFacts:
    """What an engine says of itself."""

    dtype: str
    quantization: str | None
    max_model_len: int
    vocab_size: int
    logprobs_mode: str
    prefix_caching: bool
    device: str


def open_engine(
    folder: str | Path, options: VLLMOptions, *, device: torch.device | None = None, **arguments: Any
) -> LLMEngine:
    """An engine in this process, with the weights of ``folder``. Close it with ``close_engine``.

    Args:
        folder: config.json and safetensors.
        options: of the engine.
        device: a GPU by its number; None is the platform's first.
        **arguments: of ``vllm.EngineArgs``; they come before those of ``options.arguments``.

    Raises:
        ValueError: options that vLLM refuses, or an engine that is not what the options ask for.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"vLLM starts from a folder with config.json, and {str(folder)!r} has none")
    given: dict[str, Any] = {
        "model": str(folder),
        "dtype": options.activations,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "enforce_eager": options.enforce_eager,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "logprobs_mode": "processed_logprobs",
        # The folder's generation_config.json must not change how rl_bridge samples.
        "generation_config": "vllm",
        "seed": 0,
    }
    if options.kv_cache_gib is not None:
        given["kv_cache_memory_bytes"] = int(options.kv_cache_gib * 2**30)
    ranks = options.tensor_parallel_size
    if ranks > 1:
        given |= {
            "tensor_parallel_size": ranks,
            "distributed_executor_backend": "mp",
            "worker_extension_cls": EXTENSION,
        }
    if device is not None and device.type == "cuda":
        given["device_ids"] = [(device.index or 0) * ranks + rank for rank in range(ranks)]
        given["enable_sleep_mode"] = options.sleep
    given |= options.engine_arguments() | arguments
    if ranks == 1 and parallel_state.model_parallel_is_initialized():
        raise ValueError("this process has an engine of vLLM already, and vLLM has room for one: close it first")
    memory_given = options.kv_cache_gib is not None
    with (
        _in_process(memory_given=memory_given, ranks=ranks),
        world_of_one() as world,
        classes_kept() as own,
        opening() if ranks > 1 else nullcontext(),
    ):
        try:
            engine = LLMEngine.from_engine_args(EngineArgs(**given))
        except BaseException:
            if ranks == 1:
                _leave_groups()
            raise
    WORLDS[engine] = world
    try:
        if ranks == 1:
            engine.collective_rpc(_take_classes, args=(own,))
        else:
            WATCHES[engine] = Watch(engine)
        _require(facts(engine), options)
    except BaseException:
        close_engine(engine)
        raise
    return engine


def _take_classes(worker: Any, own: Changed) -> None:
    take(worker.model_runner.model, own)


def close_engine(engine: LLMEngine) -> None:
    """Stop the engine and free its memory: weights, keys and values. A second call does nothing."""
    world = WORLDS.pop(engine, None)
    if world is None:
        return
    watch = WATCHES.pop(engine, None)
    if watch is not None:
        watch.closing()
    with world_of_one():
        # vLLM ends with destroying the default group, which may be a trainer's.
        engine.engine_core.shutdown()
        # The groups of ranks are in their processes; those that are here may be another engine's.
        if watch is None:
            _leave_groups()
        else:
            watch.close()
    for group in world:
        dist.destroy_process_group(group)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _leave_groups() -> None:
    """Let go of vLLM's process groups, and of the default one if there is one now."""
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def facts(engine: LLMEngine) -> EngineFacts:
    """What the engine is, from its own configuration after its start."""
    config = engine.vllm_config
    model = config.model_config
    return EngineFacts(
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=model.quantization,
        max_model_len=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        logprobs_mode=model.logprobs_mode,
        prefix_caching=bool(config.cache_config.enable_prefix_caching),
        device=str(config.device_config.device),
    )


def _require(found: EngineFacts, options: VLLMOptions) -> None:
    """Raise unless the engine is what was asked for."""
    if found.dtype != options.activations:
        raise ValueError(f"the engine computes in {found.dtype}, and {options.activations} was asked for")
    if found.logprobs_mode != "processed_logprobs":
        raise ValueError(
            f"the engine's log-probabilities are {found.logprobs_mode}; training needs processed_logprobs, those of "
            "the distribution that is sampled from"
        )
    if options.precision in ("fp32", "bf16") and found.quantization is not None:
        raise ValueError(f"the engine is quantised by {found.quantization}, and {options.precision} was asked for")
    if options.precision not in ("fp32", "bf16") and found.quantization is None:
        raise ValueError(f"the engine is not quantised, and precision {options.precision} was asked for")
    if options.precision == "int8" and (scales := keep_alive.state()) == "missing":
        raise ValueError(f"the scales of int8 layers are {scales}: plugin.register() keeps them, and was not called")


@contextmanager
def _in_process(*, memory_given: bool, ranks: int) -> Iterator[None]:
    """Inside, vLLM starts its core in this process; the process's threads and random numbers are left as they were."""
    wanted: dict[str, str | None] = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # The threads of this process are not vLLM's; those of ranks may be.
        **({BIND: "nobind"} if ranks == 1 else binding(ranks)),
        "VLLM_NO_USAGE_STATS": "1",
        # The sampler that Draws knows.
        "VLLM_USE_V2_MODEL_RUNNER": os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0"),
    }
    if ranks > 1:
        # A fork would take along threads of a trainer, and whatever locks they hold.
        wanted["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if memory_given:
        wanted["VLLM_CPU_KVCACHE_SPACE"] = None  # or it would come before the option
    before = {name: os.environ.get(name) for name in wanted}
    # The CPU worker puts a function in the place of torch's that ignores the call; a trainer may share the process.
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    numpy_state, python_state = np.random.get_state(), random.getstate()
    _set(wanted)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    """Set environment variables; None takes one away."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
