"""Inputs of the policy recipe: rows, model and rewards, each tried before a run begins, and the models beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_bridge.algorithms.policy_setup import require_parts
from rl_bridge.common.terminal import remark
from rl_bridge.data.census import Census
from rl_bridge.data.rows import answered_row, policy_row
from rl_bridge.environments import EnvironmentFactory
from rl_bridge.loop.data import Model, Rows, in_hand
from rl_bridge.loop.trained import Policy
from rl_bridge.models.model_source import ModelSource, PretrainedSource, PretrainedValueSource
from rl_bridge.models.pretrained import pretrained, require_vocabulary, save_pretrained
from rl_bridge.models.row_checks import (
    check_rows,
    imitated_rows,
    prompted,
    remark_on_conversations,
    remark_on_prompts,
    require_as_long,
    supervised,
)
from rl_bridge.models.tokenizer_files import tokenizer_in
from rl_bridge.pipelines.training import load_model, load_rows, seed_everything, undivided
from rl_bridge.rewards import Reward, Rewards, load
from rl_bridge.rewards.sources import named
from rl_bridge.run.provenance import HELD_OUT, of_rows, with_evaluation
from rl_train.policy_options import PolicyPipeline


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """The model that a policy starts from, its prompts and the rewards of its completions."""

    model: Model
    rows: Rows
    held_out: list[dict[str, Any]]
    rewards: Rewards
    census: Census

    @classmethod
    def of(
        cls,
        options: PolicyPipeline,
        model: Model,
        rows: Sequence[Mapping[str, Any]],
        held_out: Sequence[Mapping[str, Any]],
        reward: Reward | Rewards,
        census: Census | None = None,
    ) -> "PolicyInputs":
        """Inputs in hand, each row checked. ``census``: of the sources of the rows; None: all are in hand.

        Raises:
            ValueError: a row that the model cannot read, or that leaves no room for a completion: the first few.
        """
        new_tokens = options.policy.sampling.max_new_tokens
        model.remark_on_ends()
        rows, held_out = in_hand(rows), in_hand(held_out)
        both = [*rows, *held_out]
        check_rows(model.source, model.tokenizer, both, prompted(model.tokenizer), new_tokens=new_tokens)
        return cls(
            model=model,
            rows=Rows(rows, seed=options.seed),
            held_out=held_out,
            rewards=reward if isinstance(reward, Rewards) else load(reward),
            census=Census.of_rows(rows, held_out) if census is None else census,
        )


def inputs_of(options: PolicyPipeline) -> PolicyInputs:
    """Those that the options name, each row checked.

    Raises:
        FileNotFoundError, ValueError: as ``load_rows`` and ``load_model`` do, or an objective that cannot be trained.
    """
    rewards, census = options.rewards(), Census()
    train, held_out = rows_of(options, census)
    seed_everything(options.seed)  # a reader of the user's may have drawn numbers
    options.checked_objective()
    both = [*train, *held_out]
    source, tokenizer = load_model(options, both)
    model = Model(source, tokenizer)
    inputs = PolicyInputs.of(options, model, train, held_out, rewards, census)
    if options.sft.steps:
        # A warm start reads the prompts, and responses too.
        imitated = imitated_rows(train)
        check_rows(source, tokenizer, imitated, supervised(tokenizer))
        remark_on_conversations(tokenizer, imitated, keys := model.keys_met("imitated"))
        of_prompts = model.keys_met("prompts")  # the prompts are of the same rows
        of_prompts.read |= keys.read
        of_prompts.named |= keys.named
        of_prompts.words |= keys.words
    remark_on_prompts(tokenizer, held_out if options.sft.steps else both, model.keys_met("prompts"))
    return inputs


def rows_of(options: PolicyPipeline, census: Census | None = None) -> tuple[list[dict], list[dict]]:
    """Rows to train on and rows held out; ``census`` gets their numbers."""
    sources = options.reward or (() if options.environment else ("exact",))
    compared = "exact" in [source for _, source in map(named, sources)]
    fields = ("prompt", "answer") if compared or options.sft.steps else ("prompt",)
    return load_rows(options, fields, answered_row if compared else policy_row, census)


@dataclass(frozen=True, kw_only=True)
class Beside:
    """The models and the environment beside a policy, and the fingerprints of all inputs."""

    marks: dict[str, str]
    environment: EnvironmentFactory | None
    critic: ModelSource | None
    """A value model of its own; None: the critic has the policy's trunk, or there is none."""
    teacher: Model | None


def settled(options: PolicyPipeline, inputs: PolicyInputs) -> Beside:
    """Count the rows, and try everything that a run would find out late.

    Raises:
        FileNotFoundError, ValueError: too few rows, a reward or an environment that fails, a model that cannot be
            exported, one beside the policy that does not fit it, or an engine that cannot be here.
    """
    model, both = inputs.model, [*inputs.rows.rows, *inputs.held_out]
    inputs.census.settle(trained=len(inputs.rows), held_out=len(inputs.held_out), step=options.rows_of_steps())
    options.remark_on_warmups()
    talks = options.environment is not None
    inputs.rewards.try_on(inputs.rows.rows, model.tokenizer, beside=options.asynchronous.on, conversations=talks)
    options.require_one_a_reward(inputs.rewards.names)
    factory = options.environments(model.source)
    environment = options.tried(factory, inputs.rows.rows, model.tokenizer, resumed=options.resumed)
    marks = {"data": of_rows(inputs.rows.rows, inputs.held_out), "reward": inputs.rewards.fingerprint}
    marks |= {HELD_OUT: of_rows(inputs.held_out)} | undivided(inputs.census) | options.fingerprints(model.tokenizer)
    marks = with_evaluation(marks, **options.measure())
    objective, _ = options.checked_objective()
    require_parts(objective, options.shared()["mesh"])
    options.rehearse(model)
    teacher = None if options.teacher is None else teacher_model(options.teacher, model)
    critic = None if objective.value is None else value_source(options.critic.model, model)
    for role, beside in (("critic", critic), ("teacher", None if teacher is None else teacher.source)):
        if beside is not None:
            new_tokens, limit = options.policy.sampling.max_new_tokens, options.longest_conversation
            require_as_long(beside, model.source, model.tokenizer, both, new_tokens, limit, role=role)
    options.rollout.factory(model.source, model.tokenizer, sleep=options.offload == "phases")
    return Beside(marks=marks, environment=environment, critic=critic, teacher=teacher)


def value_source(name: str | None, policy: Model) -> ModelSource | None:
    """The source of a critic of its own; None: the critic has the policy's trunk.

    Raises:
        ValueError: no such model, another head, weights that do not fit, or another vocabulary than the policy's.
    """
    if name is None:
        return None
    source = PretrainedValueSource(name)
    with torch.device("meta"):
        source.check(source.empty())
    try:
        tokenizer = tokenizer_in(name, alone=True)
    except (OSError, ValueError):
        remark(f"the critic {name} has no tokenizer to compare with the policy's, whose ids it reads as its own")
    else:
        require_vocabulary(tokenizer, policy.tokenizer, kind="critic")
    return source


def teacher_model(name: str, student: Model) -> Model:
    """The teacher.

    Raises:
        ValueError: no such model, or its vocabulary is not the policy's: its probabilities would be of other tokens.
    """
    source, tokenizer = pretrained(name)
    require_vocabulary(tokenizer, student.tokenizer)
    return Model(source, tokenizer)


def critic_model(beside: Beside, model: Model, policy: Policy, folder: Path, *, warm: bool) -> Model:
    """The model of the values: one of its own, or the policy's trunk, after the warm start where there was one.

    ``folder``: the run's, which gets the trunk of a ``warm`` policy.
    """
    if beside.critic is not None:
        return Model(beside.critic, model.tokenizer)
    if not warm:
        return model
    trunk = folder / "warm_start"
    if not trunk.exists():
        save_pretrained(trunk, policy.engine, model.tokenizer)
    return Model(PretrainedSource(str(trunk)), model.tokenizer)
