"""Policy optimisation on rewarded completions: GRPO, DAPO, RLOO, PPO with a critic …, by the objective."""

from typing import Any

from rl_bridge.algorithms.advantages import Inputs
from rl_bridge.algorithms.coefficients import Coefficients
from rl_bridge.algorithms.completion_log import CompletionLog
from rl_bridge.algorithms.evaluation import Evaluator
from rl_bridge.algorithms.policy_setup import PolicyConfig, PolicyEngines, Replaced, require_fit
from rl_bridge.algorithms.sampling import Sampler, without_signal
from rl_bridge.algorithms.update import Updates
from rl_bridge.data.token_batch import collate
from rl_bridge.memory.garbage_collection import collector_waits, phase_ended
from rl_bridge.run.run import Run
from rl_fn import Objective

MANY = 0.5
"""A share of completions without an end that a user should hear of."""


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
    warned, idle = False, 0
    for step in run.steps("policy", config.steps, state=state):
        sampler.begin_step(engines)
        sampled = sampler.sample(step)
        phase_ended()

        batch = inputs.scored(collate(sampled.trajectories, pad_token_id), sampled, step)
        terms = coefficients.values()
        batch, computed, counted = inputs.advantages(batch, sampled, terms)
        if not bool(computed.any()):
            idle += 1
            if idle.bit_count() == 1:  # the 1st, 2nd, 4th … of this session: not a line each
                run.print(f"step {step}: {without_signal(sampled)}" + (f"; {idle} such steps" if idle > 1 else ""))

        phase_ended()
        metrics = sampled.metrics() | {"informative": float(computed.float().mean())}
        metrics |= inputs.metrics(batch) | coefficients.metrics()
        watched = None if completions is None else completions.choose(step, computed)
        metrics |= updates.make(step, batch, computed, counted, terms, watched)
        if completions is not None and watched is not None:
            completions.write(step, sampled, batch, watched, updates.watched())
        if not warned and metrics["truncated"] >= MANY:
            warned = True
            limit = f"--policy.sampling.max-new-tokens {config.sampling.max_new_tokens}"
            share = f"{metrics['truncated']:.0%} of the completions were cut at {limit}"
            run.print(f"step {step}: {share}: their rewards are of beginnings. The metric truncated has what follows")
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
