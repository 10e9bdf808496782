"""``rl-fn train policy``: reinforcement learning on rewarded completions, from a warm start to the export."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rl_bridge.algorithms.evaluation import Evaluator, gain, write_samples
from rl_bridge.algorithms.policy_setup import PolicyConfig, seed_of
from rl_bridge.environments import EnvironmentFactory
from rl_bridge.loop.ahead import Ahead
from rl_bridge.loop.data import NLL
from rl_bridge.loop.groups import GroupBatch, Groups
from rl_bridge.loop.loop_run import Run
from rl_bridge.loop.rollout import Rollout
from rl_bridge.loop.scored import Reference, Scored, Teacher
from rl_bridge.loop.trained import Policy
from rl_bridge.loop.values import Critic
from rl_bridge.run.provenance import EVALUATION
from rl_bridge.run.run import Observer
from rl_fn import Objective
from rl_train.policy_inputs import Beside, PolicyInputs, critic_model, inputs_of, settled
from rl_train.policy_options import PolicyPipeline


def run_policy(
    options: PolicyPipeline,
    observers: Sequence[Observer] = (),
    read: Callable[[PolicyPipeline], PolicyInputs] = inputs_of,
) -> dict[str, Any]:
    """Run the recipe to its end and return the summary that ``summary.json`` holds.

    ``read`` gives model, rows and rewards, once the run's processes are there: by default those that the options name.
    """
    options.begin()
    inputs = read(options)
    beside = settled(options, inputs)
    model, rows, config, warm_start = inputs.model, inputs.rows, options.policy, options.sft
    objective, control = options.objective_and_control()
    with (
        closing(inputs.rewards),
        ExitStack() as open_models,
        Run.of(options, beside.marks, census=inputs.census, observers=observers, **options.of_run()) as run,
    ):
        run.keep_best("held_out")
        enter = open_models.enter_context
        place, part, apart = options.shared(), options.trained_part(), options.asynchronous.rollout_workers
        rollout = enter(Rollout(model, options.rollout, workers=apart, turns=place["turns"]))
        options.require_engine(rollout.engine, [*rows.rows, *inputs.held_out], model.tokenizer, config.sampling)
        place["apart_from"] = [rollout] if apart else []
        warm = None
        if warm_start.steps:
            # The target of supervision is the data's own distribution, which has no temperature.
            own = {**place, **part, "scoring": options.scoring(1.0)}
            warm = enter(Policy(model, NLL(), options.adamw(warm_start.steps, warm_start.optimizer), **own))
            for _ in run.steps(warm_start.steps, [warm, rows]):
                run.log(warm.update(rows.take(warm_start.rows_per_step)))
        own = {"control": control, **options.of_policy(), **place, **part}
        policy = enter(Policy(model, objective, options.adamw(options.policy_updates), **own))
        models = beside_policy(options, inputs, beside, policy, warm=warm, folder=run.folder, place=place, enter=enter)
        complete = options.complete(rollout.engine, beside.environment)
        as_before = {"seed": options.seed, "mark": beside.marks.get(EVALUATION, "")}
        held_out = Evaluator(complete, inputs.rewards, inputs.held_out, config, run.folder, **as_before)
        policy.sync_weights(rollout)
        before = run.once("before", held_out.both)
        if before is not None:
            run.print(f"held-out {options.scale} before reinforcement learning: {before['greedy']['reward']:.3f}")
        if not (run.folder / "samples.json").exists():
            write_samples(run.folder, before=before)
        ahead = None
        if options.asynchronous.on:
            sampling = replace(config.sampling, seed=options.seed)
            running = {"environment": beside.environment, **options.of_ahead()}
            ahead = enter(Ahead(rollout, policy, rows, inputs.rewards, sampling, **running))
        renew = partial(policy.sync_weights, rollout) if ahead is None else ahead.sync
        state = [*models.changing(), rows if ahead is None else ahead, *([held_out] if held_out.archive else [])]
        for step in run.steps(config.steps, state):
            if config.reference_every and step and step % config.reference_every == 0:
                policy.sync_weights(models.reference, share=config.reference_share)
            if ahead is None:
                policy.sync_weights(rollout)
                groups = draw(options, rollout, inputs, objective, beside.environment, step)
            else:
                groups = ahead.groups()
            batch = models.inputs_of_advantages(groups.batch(), objective, rescored=config.recompute_old_logprobs)
            of_run = {"correct_reward": config.correct_reward, "coefficients": policy.coefficients}
            batch = batch.with_advantages(objective, **of_run)
            measured: list[Any] = [groups, *models.update(batch, config, trains=step >= config.critic_warmup)]
            if held_out.due(step):
                renew()
                measured.append(held_out.metrics(step))
            run.log(*measured)
        renew()  # a run that is resumed after its last step has given the rollout no weights
        after = held_out.both()
        held_out.draw()
        write_samples(run.folder, before=before, after=after)
        policy.save(run.folder / "model")
        if run.load_best(policy) is not None:
            policy.save(run.folder / "best")
        both = " → ".join(f"{each['greedy']['reward']:.2f}" for each in (before, after) if each is not None)
        own = {"objective": objective.explain(), **options.about(*models.all())}
        run.finish(f"held-out {options.scale} {both}", **gains(before, after), **own)
    return run.summary


@dataclass(frozen=True, kw_only=True)
class Models:
    """The policy, and what its objective reads beside it."""

    policy: Policy = field(kw_only=False)
    reference: Reference | None = None
    critic: Critic | None = None
    teacher: Teacher | None = None
    follows: bool = False
    """Whether the reference has other weights than the model that the run begins with."""

    def all(self) -> list[Scored]:
        """Those that there are, the policy first."""
        return [model for model in (self.policy, self.reference, self.critic, self.teacher) if model is not None]

    def changing(self) -> list[Scored]:
        """Those that a checkpoint holds."""
        reference = self.reference if self.follows else None
        return [model for model in (self.policy, reference, self.critic) if model is not None]

    def inputs_of_advantages(self, batch: GroupBatch, objective: Objective, *, rescored: bool) -> GroupBatch:
        """The batch with what the advantages read; ``rescored``: π_old is the trainer's."""
        needed = objective.required_rollout_fields
        if rescored and "old_logprobs" in needed:
            batch = self.policy.score(batch)
        if self.reference is not None and "ref_logprobs" in needed:
            batch = self.reference.score(batch)
        for scorer in (self.critic, self.teacher):
            batch = batch if scorer is None else scorer.score(batch)
        return batch

    def update(self, batch: GroupBatch, config: PolicyConfig, *, trains: bool) -> list[Mapping[str, float]]:
        """The updates of the critic, and of the policy where that ``trains``; the metrics of each.

        Behind the advantages, rows with a gradient alone are scored.
        """
        several: dict[str, Any] = {"updates": config.updates_per_step}
        of_critic = [] if self.critic is None else [self.critic.update(batch, **several)]
        if not trains:
            return [*of_critic, self.policy.update(batch, updates=0)]
        for scorer in (self.policy if config.recompute_old_logprobs else None, self.reference):
            batch = batch if scorer is None else scorer.score(batch, **several)
        return [*of_critic, self.policy.update(batch, **several)]


def beside_policy(
    options: PolicyPipeline,
    inputs: PolicyInputs,
    beside: Beside,
    policy: Policy,
    *,
    warm: Policy | None,
    folder: Path,
    place: Mapping[str, Any],
    enter: Callable[[Any], Any],
) -> Models:
    """The policy and the models beside it, all of the weights that reinforcement learning begins with.

    ``warm`` is released, the models are entered.
    """
    objective, model = policy.objective, inputs.model
    assert isinstance(objective, Objective)
    if warm is not None:
        warm.sync_weights(policy)
        warm.release()
    models: dict[str, Any] = {"follows": options.reference_follows}
    if options.needs_reference:
        models["reference"] = enter(Reference(model, **place))
        if warm is not None:
            policy.sync_weights(models["reference"])
    if objective.value is not None:
        trunk = critic_model(beside, model, policy, folder, warm=warm is not None)
        optimizer = options.adamw(options.critic_updates, options.critic.optimizer)
        models["critic"] = enter(Critic(trunk, objective, optimizer, **place))
    if beside.teacher is not None:
        models["teacher"] = enter(Teacher(beside.teacher, model, **place))
    return Models(policy, **models)


def gains(before: Mapping[str, Mapping[str, Any]] | None, after: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Both evaluations, compared; the last one alone where the first one was of other rows or rewards."""
    numbers = {"accuracy_after": after["greedy"]["reward"], "sampled_after": after["sampled"]["reward"]}
    if before is None:
        return numbers
    return {
        "accuracy_before": before["greedy"]["reward"],
        "gain": gain(after["greedy"], before["greedy"]),
        "sampled_before": before["sampled"]["reward"],
        "sampled_gain": gain(after["sampled"], before["sampled"]),
        **numbers,
    }


def draw(
    options: PolicyPipeline,
    rollout: Rollout,
    inputs: PolicyInputs,
    objective: Objective,
    environment: EnvironmentFactory | None,
    step: int,
) -> Groups:
    """The groups of a step, with rewards: ``prompts_per_step`` of these.

    With several rounds the groups are the first ones that dynamic sampling keeps. If too few are kept, they are all
    that are; and if none is, the last round's as they are.
    """
    config, rows = options.policy, inputs.rows
    conversing = options.of_conversations() | {"environment": environment}
    generate = rollout.generate if environment is None else partial(rollout.converse, **conversing)
    rounds: list[Groups] = []
    while True:
        prompts = rows.take(config.prompts_per_step)
        # Seeds of further rounds are those of no step.
        sampling = replace(config.sampling, seed=seed_of(options.seed, step) + (len(rounds) << 48))
        groups, greedy = generate(prompts, sampling), None
        if "greedy_rewards" in objective.required_rollout_fields:
            greedy = generate(prompts, replace(config.sampling, n=1).greedily())
        groups = groups.score(inputs.rewards, greedy=greedy, **options.of_rewards())
        if config.sampling_rounds == 1:
            return groups
        rounds.append(groups.with_signal(objective))
        count_left = sum(len(part.rewards) for part in rounds)
        if count_left >= config.prompts_per_step or len(rounds) == config.sampling_rounds:
            several = Groups.joined(rounds)
            if count_left:
                return several.select(range(min(count_left, config.prompts_per_step)))
            return replace(groups, sampled=replace(groups.scored, sampled_groups=several.scored.sampled_groups))
