"""Rollouts ahead of a trainer that does nothing but make new weights, on a real model."""

import functools
import time

import torch

import rl_fn
from rl_bridge.algorithms.ahead_sampler import AheadSampler
from rl_bridge.algorithms.completions import completions
from rl_bridge.algorithms.policy_setup import PolicyConfig, PolicyEngines
from rl_bridge.data.rows import RowStream
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.models.small import TinySource, character_tokenizer
from rl_bridge.rewards import load
from rl_bridge.rollout.ahead.pumps import Admission
from tests.support.plain_sampler import PlainSampler

TOKENIZER = character_tokenizer("0123456789+=")
SOURCE = TinySource.for_tokenizer(TOKENIZER, hidden=16, layers=2, heads=2)
ROWS = [{"prompt": f"{i}+{7 * i}=", "answer": str(8 * i), "_where": f"row {i}"} for i in range(9)]
CONFIG = PolicyConfig(
    steps=5,
    prompts_per_step=3,
    sampling=SamplingParams(n=2, max_new_tokens=14, temperature=0.9),
)


@functools.cache
def weights_of(version):
    """Other weights for each version, so different that no token's probability is near that of another version."""
    model = SOURCE.whole()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(100 + version)
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) * (parameter.dim() > 1))
    return model


def given(host, name, state, version):
    worker = host.workers[name].module
    worker._model.load_state_dict(state)
    worker.weight_receiver().version = version


class Weights:
    """Stands for the trainer's engine: its weights are ``weights_of`` the steps made; versions are ten times these."""

    def __init__(self, change=True):
        """Without ``change`` all versions have the same weights."""
        self.step, self.change = 0, change

    def sync_weights(self, rollout):
        rollout.run(given, rollout.name, weights_of(self.step * self.change).state_dict(), 10 * self.step)


def steps_of(sampler, policy, rollout, steps, beside=0.0):
    """What each step would train on."""
    engines, made = PolicyEngines(policy=policy, rollout=rollout), []
    for step in steps:
        sampler.begin_step(engines)
        made.append(sampler.sample(step))
        time.sleep(beside)
        policy.step = step + 1
    return made


def digits(completion, row):
    return float(sum(character in "02468" for character in completion))


def ahead(rollout, *, staleness, pace, reward=digits, window=1, config=CONFIG, objective=None, seed=5, **options):
    admission = Admission(
        max_staleness=staleness, prompts_per_step=config.prompts_per_step, window=window, steps=config.steps
    )
    rewards = load(reward) if callable(reward) else reward
    stream, objective = RowStream(ROWS, 3), objective or rl_fn.recipes.dapo()
    return AheadSampler(
        rollout,
        tokenizer=TOKENIZER,
        rewards=rewards,
        stream=stream,
        objective=objective,
        config=config,
        seed=seed,
        admission=admission,
        pace=pace,
        **options,
    )


def in_step(rollout, config=CONFIG, objective=None):
    objective = objective or rl_fn.recipes.dapo()
    return PlainSampler(completions(rollout), load(digits), RowStream(ROWS, 3), objective, config, 5)


def shown(steps):
    """The trajectories, which compare by all that they have."""
    return [trajectory for made in steps for trajectory in made.trajectories]


def full_logprobs(version, trajectory, temperature=0.9):
    with torch.no_grad():
        logits = weights_of(version)(input_ids=torch.tensor([trajectory.tokens]), use_cache=False).logits[0]
    found = (logits[:-1] / temperature).log_softmax(-1)
    return found.gather(1, torch.tensor(trajectory.tokens[1:])[:, None])[:, 0]
