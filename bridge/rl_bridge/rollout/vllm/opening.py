"""An engine of vLLM in this process, with all that this package does in one."""

# pyright: reportMissingImports=false

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, get_args

import torch
from vllm.config.lora import MaxLoRARanks
from vllm.v1.engine.llm_engine import LLMEngine

from rl_bridge.rollout.vllm.draws import Draws
from rl_bridge.rollout.vllm.engine import close_engine, open_engine
from rl_bridge.rollout.vllm.options import VLLMOptions
from rl_bridge.rollout.vllm.plugin import BACKEND, in_place, register, require_in_place
from rl_bridge.rollout.vllm.quantizing import alone
from rl_bridge.weights.quantized import Precision


def opened(
    options: VLLMOptions, device: torch.device | None, draws: Draws, folder: Path, *, own: Precision | None = None
) -> LLMEngine:
    """An engine that takes weights from trainers, with ``draws`` at work in its sampler.

    ``own``: how the engine quantises by itself what it is sent.

    Raises:
        ValueError: the engine's attention does not take the model's heads.
    """
    register()
    arguments: dict[str, Any] = {"weight_transfer_config": {"backend": BACKEND}}
    if options.adapter_rank is not None:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank_of(options.adapter_rank)}
    with nullcontext() if own is None else alone(own), _said(own):
        engine = open_engine(folder, options, device=device, **arguments)
    try:
        require_in_place(engine.collective_rpc(in_place), own)
        engine.set_weight_version("0")
        draws.attach(engine)
    except BaseException:
        close_engine(engine)
        raise
    return engine


@contextmanager
def _said(own: Precision | None) -> Iterator[None]:
    """Inside, the ranks of an engine that start read how they quantise; those of one process are patched."""
    before = os.environ.get("FLASHRL_CONFIG")
    if own is not None:
        os.environ["FLASHRL_CONFIG"] = own
    try:
        yield
    finally:
        if own is not None:
            os.environ.pop("FLASHRL_CONFIG")
        if before is not None:
            os.environ["FLASHRL_CONFIG"] = before


def rank_of(rank: int) -> int:
    """The least of vLLM's ranks that has room for this one."""
    ranks = get_args(MaxLoRARanks)
    if rank > max(ranks):
        raise ValueError(f"vLLM takes adapters of rank {max(ranks)} at most, got adapter_rank={rank}")
    return min(one for one in ranks if one >= rank)
