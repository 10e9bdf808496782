"""Full configs of known-good runs; start from one with ``dataclasses.replace`` or command-line flags."""

from rl_bridge.jobs.grpo import GRPOJob, ObjectiveConfig
from rl_bridge.trainers.grpo import GRPOConfig
from rl_bridge.trainers.module import OptimizerConfig
from rl_bridge.trainers.sft import SFTConfig
from rl_bridge.types import SamplingParams


def quickstart() -> GRPOJob:
    """GRPO of a 1 M-parameter Qwen2 on two-digit arithmetic: about five minutes on two CPU cores."""
    return GRPOJob(
        name="quickstart",
        sft=SFTConfig(steps=220, rows_per_step=256, optimizer=OptimizerConfig(learning_rate=2e-3, warmup=50)),
        grpo=GRPOConfig(steps=200, prompts_per_step=128, sampling=SamplingParams(max_new_tokens=5, n=8)),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup=10),
        objective=ObjectiveConfig(algorithm="dapo"),
    )
