"""Policy optimisation on rewarded completions: GRPO, DAPO, RLOO, PPO with a critic …, by the objective."""

from typing import Any

from rl_bridge.data.token_batch import collate
from rl_bridge.memory.collecting import collector_waits, phase_ended
from rl_bridge.tracking.run import Run
from rl_bridge.trainers.evaluation import Evaluator
from rl_bridge.trainers.policy_config import PolicyConfig
from rl_bridge.trainers.policy_inputs.completion_log import CompletionLog
from rl_bridge.trainers.policy_inputs.controlled import Coefficients
from rl_bridge.trainers.policy_inputs.engines import PolicyEngines, Replaced, require_fit
from rl_bridge.trainers.policy_inputs.inputs import Inputs
from rl_bridge.trainers.policy_inputs.sampling import Sampler, without_signal
from rl_bridge.trainers.policy_inputs.updates import Updates
from rl_fn import Objective


@collector_waits()
def train_policy(
    run: Run,
    engines: PolicyEngines,
    sampler: Sampler,
    objective: Objective,
    config: PolicyConfig,
    *,
    evaluator: Evaluator,
    coefficients: Coefficients | None = None,
    completions: CompletionLog | None = None,
    pad_token_id: int,
    seed: int,
) -> None:
    """Sample, score, compare, update; every step is logged, checkpointed when due, and resumable.

    ``completions`` keeps some of them, with what the loss had of each token.

    Raises:
        ValueError: an objective that does not go with the engines or the config (``require_fit``).
    """
    require_fit(engines, objective, config)
    inputs, updates = Inputs(engines, objective, config, seed), Updates(engines, objective, config)
    coefficients = Coefficients() if coefficients is None else coefficients
    state: dict[str, Any] = engines.state() | sampler.state()
    state |= {"coefficients": coefficients} if coefficients else {}
    state |= {} if evaluator.archive is None else {"archive": evaluator.archive}
    replaced = Replaced(engines)
    for step in run.steps("policy", config.steps, state=state):
        sampler.begin_step(engines)
        sampled = sampler.sample(step)
        phase_ended()

        batch = inputs.scored(collate(sampled.trajectories, pad_token_id), sampled, step)
        terms = coefficients.values()
        batch, computed, counted = inputs.advantages(batch, sampled, terms)
        if not bool(computed.any()):
            run.print(f"step {step}: {without_signal(sampled)}")

        phase_ended()
        metrics = sampled.metrics() | {"informative": float(computed.float().mean())}
        metrics |= inputs.metrics(batch) | coefficients.metrics()
        watched = None if completions is None else completions.choose(step, computed)
        metrics |= updates.make(step, batch, computed, counted, terms, watched)
        if completions is not None and watched is not None:
            completions.write(step, sampled, batch, watched, updates.watched())
        if warning := updates.mismatch.warning(metrics):
            run.print(warning)
        coefficients.update(metrics)
        if evaluator.due(step):
            sampler.update(engines)
            metrics |= evaluator.metrics(step)
        metrics |= replaced.metrics()
        if warning := replaced.warning(step):
            run.print(warning)
        run.log(step, metrics, tokens=int(batch.lengths.sum()), batch=batch)
        phase_ended()
