"""A run with every call between the algorithm, its engines and the reward written down."""

from dataclasses import dataclass, field
from typing import Any

import torch

from rl_bridge.engines import InferenceEngine
from rl_bridge.loop.loop_run import Run
from rl_bridge.modules.policy import PolicyModule
from rl_train import policy as recipe

# The rewards of a group differ, and each is written down with what it was asked about.
REWARD = """
from pathlib import Path

def even_digits(completion, row):
    reward = sum(character in "02468" for character in completion) + 0.1 * len(completion) + 0.001 * int(row["answer"])
    with Path(__file__).with_name("asked").open("a") as asked:
        asked.write(repr((row["prompt"], row["answer"], completion, reward)) + "\\n")
    return reward
"""


@dataclass
class Trace:
    """What happened, in order; ``weights`` are copies made at the time."""

    generated: list[Any] = field(default_factory=list)
    """(prompts, sampling, completions, the rollout's weights, the trainer's weights or None before GRPO)."""
    trained: list[Any] = field(default_factory=list)
    """(batch, denominator) of each update."""
    asked: list[Any] = field(default_factory=list)
    """(prompt, answer, completion, reward) of every call of the reward."""
    reference_at_start: Any = None
    policy_at_start: Any = None
    supervised: Any = None
    reference: Any = None
    policy: Any = None

    def training(self):
        """What was generated to train on."""
        return [call for call in self.generated if call[1].n > 1]

    def evaluation(self):
        """What was generated to evaluate."""
        return [call for call in self.generated if call[1].n == 1]


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def module_of(engine):
    """The object that the engine's only worker holds."""
    return engine.executor._host.workers[engine.name].module


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def trace_calls(monkeypatch):
    """The trace that the next run in this process writes."""
    trace, generate, train_step = Trace(), InferenceEngine.generate, PolicyModule.train_step
    beside_policy, steps, made = recipe.beside_policy, Run.steps, []

    def generating(engine, prompts, sampling):
        completions = generate(engine, prompts, sampling)
        trainer = None if trace.policy is None else weights(trace.policy.model)
        trace.generated.append((list(prompts), sampling, completions, weights(module_of(engine)._model), trainer))
        return completions

    def training(module, batch, denominator, *rest):
        trace.trained.append((batch, denominator))
        return train_step(module, batch, denominator, *rest)

    def making(*parts, **of_run):
        made.append(beside_policy(*parts, **of_run))
        return made[-1]

    def looping(run, total, state):
        if not made:
            trace.supervised = module_of(state[0].engine)
        else:
            models = made[-1]
            trace.policy, trace.reference = module_of(models.policy.engine), module_of(models.reference.engine)
            trace.policy_at_start = weights(trace.policy.model)
            trace.reference_at_start = weights(trace.reference.model)
        return steps(run, total, state)

    monkeypatch.setattr(InferenceEngine, "generate", generating)
    monkeypatch.setattr(PolicyModule, "train_step", training)
    monkeypatch.setattr(recipe, "beside_policy", making)
    monkeypatch.setattr(Run, "steps", looping)
    return trace
