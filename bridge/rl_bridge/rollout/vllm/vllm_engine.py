"""An engine of vLLM in this process: opened from a folder, what it really is, its sampling parameters.

For families without a model of its own (OLMo 2 and 3, SmolLM3, GPT-NeoX, …) vLLM takes the class from transformers, and
changes the class: each later model of that class asks for vLLM's configuration, and one that is there already cannot be
called. Here the class gets its old attributes back, and the engine's modules get a class of their own with vLLM's.
"""

# pyright: reportMissingImports=false

import gc
import os
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from transformers import PreTrainedModel
from vllm.config.lora import MaxLoRARanks
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as EngineSampling
from vllm.v1.engine.llm_engine import LLMEngine

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.rollout.inside_vllm import int8_scales
from rl_bridge.rollout.inside_vllm.plugin import BACKEND, in_place, register, require_in_place
from rl_bridge.rollout.inside_vllm.quantized_loading import alone
from rl_bridge.rollout.inside_vllm.sampler_hooks import EXTENSION, Draws
from rl_bridge.rollout.vllm.engine_options import VLLMOptions
from rl_bridge.rollout.vllm.ranks import BIND, Watch, binding, environment, opening
from rl_bridge.rollout.vllm.request_fields import request_fields
from rl_bridge.weights.source import Precision


@contextmanager
def world_of_one() -> Iterator[list[dist.ProcessGroup]]:
    """Inside, no default process group exists until one is made; afterwards that of before is the default again.

    vLLM makes its groups over the default one, all of whose processes would have to start and close their engines
    together. An engine that is its process's alone gets a world of its own, which the list holds afterwards. A trainer
    in the process keeps its world, or makes one later.
    """
    outer = distributed_c10d.GroupMember.WORLD
    distributed_c10d._update_default_pg(None)
    groups: list[dist.ProcessGroup] = []
    try:
        yield groups
    finally:
        inner = distributed_c10d.GroupMember.WORLD
        if inner is not None:
            groups.append(inner)
        distributed_c10d._update_default_pg(outer)


Changed = dict[type, type]
"""By class of transformers, the class that the engine's modules get."""


@contextmanager
def classes_kept() -> Iterator[Changed]:
    """Inside, vLLM changes classes of transformers; afterwards these are as before, and the dictionary is filled."""
    from vllm.compilation import decorators

    change, before, changed = decorators._support_torch_compile, {}, {}

    def recorded(cls: type, *args: Any, **kwargs: Any) -> type:
        if issubclass(cls, PreTrainedModel) and cls not in before:
            before[cls] = cls.__bases__, dict(vars(cls))
        return change(cls, *args, **kwargs)

    decorators._support_torch_compile = recorded
    try:
        yield changed
    finally:
        decorators._support_torch_compile = change
        for cls, (bases, attributes) in before.items():
            new = {name: value for name, value in vars(cls).items() if attributes.get(name) is not value}
            added = tuple(base for base in cls.__bases__ if base not in bases)
            cls.__bases__ = bases
            for name in new:
                if name in attributes:
                    setattr(cls, name, attributes[name])
                else:
                    delattr(cls, name)
            changed[cls] = type(cls.__name__, (cls, *added), new | {"__module__": cls.__module__})


WORLDS: WeakKeyDictionary[LLMEngine, list[dist.ProcessGroup]] = WeakKeyDictionary()
"""Torch's process group of each engine."""

WATCHES: WeakKeyDictionary[LLMEngine, Watch] = WeakKeyDictionary()
"""The watch over the ranks of each engine that has several."""


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
    engine_args = {"model": str(folder)} | options.own_arguments()
    ranks = options.tensor_parallel_size
    if ranks > 1:
        engine_args |= {"distributed_executor_backend": "mp", "worker_extension_cls": EXTENSION}
    if device is not None and device.type == "cuda":
        engine_args["device_ids"] = [(device.index or 0) * ranks + rank for rank in range(ranks)]
        engine_args["enable_sleep_mode"] = options.sleep
    engine_args |= options.engine_arguments() | arguments
    if ranks == 1 and parallel_state.model_parallel_is_initialized():
        raise ValueError("this process has an engine of vLLM already, and vLLM has room for one: close it first")
    memory_given = options.kv_cache_gib is not None
    with (
        _in_process(memory_given=memory_given, ranks=ranks),
        world_of_one() as world,
        classes_kept() as changed,
        opening() if ranks > 1 else nullcontext(),
    ):
        try:
            engine = LLMEngine.from_engine_args(EngineArgs(**engine_args))
        except BaseException:
            if ranks == 1:
                _leave_groups()
            raise
    WORLDS[engine] = world
    try:
        if ranks == 1:
            engine.collective_rpc(_take_classes, args=(changed,))
        else:
            WATCHES[engine] = Watch(engine)
        _require(engine.vllm_config.model_config, options)
    except BaseException:
        close_engine(engine)
        raise
    return engine


def _take_classes(worker: Any, own: Changed) -> None:
    """Give the engine's modules their classes."""
    for module in worker.model_runner.model.modules():
        if type(module) in own:
            module.__class__ = own[type(module)]


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


def _require(actual: Any, options: VLLMOptions) -> None:
    """Raise unless vLLM's own configuration of a model, after the start, is what the options ask for."""
    dtype = str(actual.dtype).removeprefix("torch.")
    if dtype != options.activations:
        raise ValueError(f"the engine computes in {dtype}, and {options.activations} was asked for")
    if actual.logprobs_mode != "processed_logprobs":
        raise ValueError(
            f"the engine's log-probabilities are {actual.logprobs_mode}; training needs processed_logprobs, those of "
            "the distribution that is sampled from"
        )
    if options.precision in ("fp32", "bf16") and actual.quantization is not None:
        raise ValueError(f"the engine is quantised by {actual.quantization}, and {options.precision} was asked for")
    if options.precision not in ("fp32", "bf16") and actual.quantization is None:
        raise ValueError(f"the engine is not quantised, and precision {options.precision} was asked for")
    if options.precision == "int8" and (scales := int8_scales.state()) == "missing":
        raise ValueError(f"the scales of int8 layers are {scales}: plugin.register() keeps them, and was not called")


@contextmanager
def _in_process(*, memory_given: bool, ranks: int) -> Iterator[None]:
    """Inside, vLLM starts its core in this process; the process's threads and random numbers are left as they were."""
    variables: dict[str, str | None] = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # The threads of this process are not vLLM's; those of ranks may be.
        **({BIND: "nobind"} if ranks == 1 else binding(ranks)),
        "VLLM_NO_USAGE_STATS": "1",
        # The sampler that Draws knows.
        "VLLM_USE_V2_MODEL_RUNNER": os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0"),
    }
    if ranks > 1:
        # A fork would take along threads of a trainer, and whatever locks they hold.
        variables["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if memory_given:
        variables["VLLM_CPU_KVCACHE_SPACE"] = None  # or it would come before the option
    # The CPU worker puts a function in the place of torch's that ignores the call; a trainer may share the process.
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with environment(variables):
        try:
            with torch.random.fork_rng(devices):
                yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(threads)


def opened(
    options: VLLMOptions, device: torch.device | None, draws: Draws, folder: Path, *, own: Precision | None = None
) -> LLMEngine:
    """An engine that takes weights from trainers, with ``draws`` at work in its sampler.

    ``own``: how the engine itself quantises the weights that it is sent.

    Raises:
        ValueError: the engine's attention does not take the model's heads.
    """
    register()
    arguments: dict[str, Any] = {"weight_transfer_config": {"backend": BACKEND}}
    if options.adapter_rank is not None:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank_of(options.adapter_rank)}
    # Ranks that start read how they quantise; an engine of one process is patched.
    announced = {} if own is None else {"FLASHRL_CONFIG": own}
    with nullcontext() if own is None else alone(own), environment(announced):
        engine = open_engine(folder, options, device=device, **arguments)
    try:
        require_in_place(engine.collective_rpc(in_place), own)
        engine.set_weight_version("0")
        draws.attach(engine)
    except BaseException:
        close_engine(engine)
        raise
    return engine


def rank_of(rank: int) -> int:
    """The least of vLLM's ranks that has room for this one."""
    ranks = get_args(MaxLoRARanks)
    if rank > max(ranks):
        raise ValueError(f"vLLM takes adapters of rank {max(ranks)} at most, got adapter_rank={rank}")
    return min(one for one in ranks if one >= rank)


def vllm_sampling(
    sampling: SamplingParams, *, seed: int, drawn: int = 0, limit: int, stop: Collection[int], whole: bool = True
) -> EngineSampling:
    """``request_fields`` as vLLM's object.

    ``whole``: the engine gives out finished sequences; else each as far as it is, after each step.
    """
    return EngineSampling(
        **request_fields(sampling, seed=seed, drawn=drawn, limit=limit, stop=stop),
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.CUMULATIVE,
    )
