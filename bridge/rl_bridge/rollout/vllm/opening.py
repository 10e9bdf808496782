"""An engine of vLLM in this process, with all that this package does in one."""

# pyright: reportMissingImports=false

from pathlib import Path

import torch
from vllm.v1.engine.llm_engine import LLMEngine

from rl_bridge.rollout.vllm.draws import Draws
from rl_bridge.rollout.vllm.engine import close_engine, open_engine
from rl_bridge.rollout.vllm.options import VLLMOptions
from rl_bridge.rollout.vllm.plugin import BACKEND, in_place, register, require_in_place


def opened(options: VLLMOptions, device: torch.device | None, draws: Draws, folder: Path) -> LLMEngine:
    """An engine that takes weights from trainers, with ``draws`` at work in its sampler.

    Raises:
        ValueError: the engine's attention does not take the model's heads.
    """
    register()
    engine = open_engine(folder, options, device=device, weight_transfer_config={"backend": BACKEND})
    try:
        require_in_place(engine.collective_rpc(in_place))
        engine.set_weight_version("0")
        draws.attach(engine)
    except BaseException:
        close_engine(engine)
        raise
    return engine
