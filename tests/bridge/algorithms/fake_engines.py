"""Engines that write down what they were asked, and the loop of a policy around them."""

import torch

import rl_fn
from rl_bridge.algorithms.completions import Sampler, completions
from rl_bridge.algorithms.evaluation import Evaluator
from rl_bridge.algorithms.policy_setup import PolicyConfig, PolicyEngines, SamplingOptions
from rl_bridge.algorithms.policy_training import train_policy
from rl_bridge.data.rows import RowStream
from rl_bridge.data.trajectory import single_turn
from rl_bridge.engines import Mesh
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.rewards import load

ROWS = [{"prompt": str(i), "answer": str(i), "_where": f"rows, row {i}"} for i in range(10)]


class FakeRun:
    def __init__(self):
        self.records, self.printed = [], []

    def steps(self, stage, total, *, state):
        self.state = state
        yield from range(total)

    def print(self, text):
        self.printed.append(text)

    def log(self, step, metrics, *, tokens, batch):
        self.records.append({**metrics, "tokens_in_batch": tokens})


class FakeRollout:
    """Answers sample number s of every prompt with s + 1 tokens."""

    methods = frozenset()

    def __init__(self):
        self.calls = []

    def generate(self, prompts, sampling):
        self.calls.append((list(prompts), sampling))
        return [
            single_turn(
                [2] * (1 + i % 2),
                [3 + s] * (s + 1),
                logprobs=[-1.0] * (s + 1),
                group=i,
                messages=({"role": "assistant", "content": f"{prompt}/{s}"},),
            )
            for i, prompt in enumerate(prompts)
            for s in range(sampling.n)
        ]


class FakePolicy:
    """Counts updates; its log-probabilities are minus the number of updates so far, less one."""

    mesh = Mesh()
    replaced_engines = 0

    def __init__(self):
        self.events, self.batches, self.updates = [], [], 0

    def scoring_config(self):
        return ScoringConfig(temperature=0.8)

    def sync_weights(self, rollout):
        self.events.append("sync")

    def token_logprobs(self, batch):
        self.events.append("logprobs")
        return torch.full(batch.data.mask.shape, -1.0 - self.updates)

    def train_step(self, batch, denominator, coefficients=None):
        self.events.append("train")
        self.batches.append((batch.data, denominator))
        return {"loss": rl_fn.Ratio(torch.tensor(2.0), torch.tensor(4.0))}

    def optimizer_step(self):
        self.updates += 1
        return {"grad_norm": 1.0}


def run_loop(reward, objective=None, reference=None, steps=2, run=None, policy=None, critic=None, **options):
    sampling = SamplingOptions(max_new_tokens=4, temperature=0.8)
    config = PolicyConfig(
        **{"steps": steps, "prompts_per_step": 3, "responses_per_prompt": 4, "sampling": sampling, "evaluate_every": 2}
        | options
    )
    run, policy, rollout = run or FakeRun(), policy or FakePolicy(), FakeRollout()
    chosen = rl_fn.recipes.dapo() if objective is None else objective
    complete, rewards = completions(rollout), load(reward)
    train_policy(
        run,
        PolicyEngines(policy=policy, rollout=rollout, reference=reference, critic=critic),
        Sampler(complete, rewards, RowStream(ROWS, 0), chosen, config, 7),
        chosen,
        config,
        evaluator=Evaluator(complete, rewards, ROWS[:5], config, None),
        pad_token_id=0,
        seed=7,
    )
    return run, policy, rollout


def longest_is_best(completion, row):
    return float(completion.split("/")[1])
