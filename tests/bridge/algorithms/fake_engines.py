"""Engines that write down what they were asked, and the policy's recipe over these."""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

import rl_fn
from rl_bridge.algorithms.policy_setup import PolicyConfig
from rl_bridge.data.trajectory import SamplingParams, single_turn
from rl_bridge.loop.data import Model
from rl_bridge.loop.rollout import Rollout
from rl_bridge.models.small import TinySource, character_tokenizer
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.pipelines.placement import Engines
from rl_bridge.run import run
from rl_train.policy import draw, run_policy
from rl_train.policy_inputs import Beside, PolicyInputs
from rl_train.policy_options import PolicyPipeline, WarmStart

ROWS = [{"prompt": str(i), "answer": str(i), "_where": f"rows, row {i}"} for i in range(10)]
TOKENIZER = character_tokenizer("0123456789+=")
MODEL = Model(TinySource.for_tokenizer(TOKENIZER, hidden=16, layers=1, heads=2), TOKENIZER)
OF_RUN = ("stage", "step", "seconds", "tokens_per_second", "run", "attempt", "time")
"""Numbers of a record that no engine has a part in."""


class FakeEngine:
    """Lies in no worker, and so has no memory to give back."""

    slots = ()
    methods = frozenset()


class FakeRollout(FakeEngine):
    """Answers sample number s of every prompt with s + 1 tokens, by the weights that it was given last."""

    version = 0

    def __init__(self):
        self.calls = []

    def ends(self):
        return (), None

    def narrower(self):
        return None

    def generate(self, prompts, sampling):
        self.calls.append((list(prompts), sampling))
        return [
            single_turn(
                [2] * (1 + i % 2),
                [3 + s] * (s + 1),
                logprobs=[-1.0] * (s + 1),
                version=self.version,
                group=i,
                messages=({"role": "assistant", "content": f"{prompt}/{s}"},),
            )
            for i, prompt in enumerate(prompts)
            for s in range(sampling.n)
        ]


class FakePolicy(FakeEngine):
    """Counts updates; its log-probabilities are minus the number of updates so far, less one."""

    replaced_engines, loss = 0, "loss"

    def __init__(self):
        self.events, self.batches, self.updates = [], [], 0

    def call(self, name):
        assert name == "weights_version"
        return self.updates

    def scoring_config(self):
        return ScoringConfig(temperature=0.8)

    def sync_weights(self, target, adapter=None):
        assert adapter is None
        self.events.append("sync")
        target.version = self.updates

    def token_logprobs(self, batch):
        self.events.append("logprobs")
        return torch.full(batch.data.mask.shape, -1.0 - self.updates)

    def train_step(self, batch, denominator, coefficients=None):
        self.events.append("train")
        self.batches.append((batch.data, denominator))
        return {self.loss: rl_fn.Ratio(torch.tensor(2.0), torch.tensor(4.0))}

    def optimizer_step(self):
        self.updates += 1
        return {"grad_norm": 1.0}

    def checkpoint_state(self):
        return {"updates": self.updates}

    def load_checkpoint_state(self, state):
        self.updates = state["updates"]


def given(**engines):
    """``Engines`` with these in place of real ones; an engine that is None must not be asked for."""

    def maker(engine):
        def make(self, *arguments, **options):
            assert engine is not None
            return engine

        return make

    makers = {"completion_scorer" if name == "reference" else name: maker(one) for name, one in engines.items()}
    return patch.multiple(Engines, **makers)


def run_loop(reward, objective=None, reference=None, steps=2, output=None, mesh=None, sft=None, skips=3, **options):
    """The recipe's steps, with ``output`` / "policy" as the run's folder; the run, the policy and the rollout.

    ``options`` are those of ``PolicyConfig``, and engines by their names. ``sft``: a warm start.
    """
    policy, rollout = options.pop("policy", None) or FakePolicy(), FakeRollout()
    engines = {"policy": policy, "rollout": rollout, "reference": reference, "teacher": None}
    engines |= {name: options.pop(name, None) for name in ("critic", "supervised")}
    sampling = SamplingParams(n=4, max_new_tokens=4, temperature=0.8)
    counts = {"steps": steps, "prompts_per_step": 3, "sampling": sampling, "evaluate_every": 2}
    config = PolicyConfig(**counts | options)
    chosen, states = rl_fn.recipes.dapo() if objective is None else objective, []

    class Options(PolicyPipeline):
        def objective_and_control(self):
            return chosen, {}

        def shared(self):
            return super().shared() | ({} if mesh is None else {"mesh": mesh})

    def steps_of(self, stage, total, *, state, _steps=run.Run.steps):
        states.append(state)
        return _steps(self, stage, total, state=state)

    with (
        tempfile.TemporaryDirectory() as folder,
        given(**engines),
        patch.object(run.Run, "steps", steps_of),
        patch("rl_train.policy.settled", lambda *_: Beside(marks={}, environment=None, critic=None, teacher=None)),
        patch("rl_bridge.loop.scored.save_pretrained"),
        patch("rl_bridge.run.recorder.draw_curves"),
    ):
        output = Path(folder) if output is None else output
        of_run = {"output": output, "seed": 7, "stop_after_skips": skips, "samples_every": 0}
        made = Options(policy=config, track_kl=reference is not None, sft=sft or WarmStart(), **of_run)
        run_policy(made, read=lambda options: PolicyInputs.of(options, MODEL, ROWS, ROWS[:5], reward))
        lines = (output / "policy" / "metrics.jsonl").read_text().splitlines()
    records = [{name: value for name, value in json.loads(line).items() if name not in OF_RUN} for line in lines]
    return SimpleNamespace(records=records, state=states[-1]), policy, rollout


def drawn(engine, reward, config, rows, objective=None, step=0):
    """The groups of one of the recipe's steps, which a rollout over this engine draws."""
    options = PolicyPipeline(policy=config, seed=5)
    inputs = PolicyInputs.of(options, MODEL, rows, rows[:1], reward)
    with given(rollout=engine):
        rollout = Rollout(MODEL)
    return draw(options, rollout, inputs, objective or rl_fn.recipes.dapo(), None, step)


def longest_is_best(completion, row):
    return float(completion.split("/")[1])
