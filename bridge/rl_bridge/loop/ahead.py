"""``Ahead``: groups of later steps are drawn while a loop trains on a step."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Self

import rl_fn
from rl_bridge.algorithms.advantages import require_unpenalised
from rl_bridge.algorithms.policy_setup import PolicyConfig, PolicyEngines, ScalarOptions
from rl_bridge.common.argument_kinds import check_call, require_default
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines.engine import Engine
from rl_bridge.environments import EnvironmentFactory
from rl_bridge.environments.factories import fingerprint_of
from rl_bridge.environments.functions import Parse
from rl_bridge.loop.data import Rows, name_unread
from rl_bridge.loop.groups import Groups, loaded_rewards
from rl_bridge.loop.rollout import Rollout
from rl_bridge.loop.trained import Policy
from rl_bridge.memory.garbage_collection import phase_ended
from rl_bridge.pipelines.rollout_options import AsynchronousOptions, talking
from rl_bridge.rewards import Rewards
from rl_bridge.rewards.rewards import OnNone
from rl_bridge.rewards.sources import Source
from rl_bridge.run.run import Stateful


class Ahead:
    """Draws and scores groups of later steps while a step is trained on. The run's ``state`` holds it, for the rows.

    A token is trained on at most ``max_staleness`` steps after the weights that drew it: with 0 a step begins with its
    rollout, and the numbers are those of ``generate`` with ``seed=step``. ``groups`` gives the rollout new weights
    where it is time. ``steps`` is the length of the run: prompts of later steps are never drawn.

    With ``partial`` a completion goes on across an update of the weights, each token with its version; with
    ``deterministic=False`` the rollout takes new weights when there are any, and a step may choose among ``window``
    prompts. Both are explained in docs/rollouts.md.

    With ``environment`` or ``tools`` conversations are drawn, and their arguments are those of ``Rollout.converse``.

    >>> ahead = Ahead(rollout, policy, rows, reward, sampling, prompts=32, steps=200)  # doctest: +SKIP
    >>> with ahead, Run("grpo", state=[policy, ahead]) as run:  # doctest: +SKIP
    ...     for step in run.steps(200):
    ...         groups = ahead.groups()
    ...         batch = policy.score(groups.batch()).with_advantages(objective)
    ...         run.log(policy.update(batch), groups)

    Raises:
        ValueError: options that do not go together, a rollout with limits of a step, or a policy that learns from rows.
    """

    kind = "ahead"

    def __init__(
        self,
        rollout: Rollout,
        policy: Policy,
        rows: Rows,
        reward: Source | Sequence[Source] | Rewards,
        sampling: SamplingParams,
        *,
        prompts: int,
        steps: int,
        max_staleness: int = 1,
        partial: bool = False,
        deterministic: bool = True,
        tokens_beside: int | None = None,
        round_tokens: int = AsynchronousOptions.round_tokens,
        window: int = 1,
        request_seconds: float | None = None,
        weights: Sequence[float] = (),
        scalar: ScalarOptions | None = None,
        overlong_buffer: int | None = None,
        none: OnNone = "refuse",
        environment: EnvironmentFactory | str | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        parse: Parse | None = None,
        max_turns: int = 4,
        max_tokens: int | None = None,
        step_timeout: float = 60.0,
        processes: int = 0,
    ) -> None:
        check_call(Ahead.__init__, locals())
        if not isinstance(policy.objective, rl_fn.Objective):
            raise ValueError(f"{policy.objective} learns from rows: nothing is drawn for it")
        require_unpenalised(policy.objective, penalised=overlong_buffer is not None)
        rollout.require_lasting()
        policy.watch(rollout)
        self._rollout, rollout.ahead = rollout, self
        self.rows, self._prompts, self._steps, self._sampling = rows, prompts, steps, sampling
        self._of_groups: dict[str, Any] = {"pad_token": rollout.model.pad_token, "exact": rollout.exact}
        self._of_groups["tokenizer"] = rollout.model.tokenizer
        self._options = AsynchronousOptions(
            max_staleness=max_staleness,
            partial=partial,
            deterministic=deterministic,
            tokens_beside=tokens_beside,
            round_tokens=round_tokens,
            window=window,
            request_seconds=request_seconds,
        )
        config = PolicyConfig(
            steps=steps,
            prompts_per_step=prompts,
            sampling=replace(sampling, seed=SamplingParams.seed),
            scalar=scalar or ScalarOptions(),
            overlong_buffer=overlong_buffer,
        )
        self._rewards = loaded_rewards(reward, weights, none)
        self._of_rewards = {"scalar": asdict(config.scalar), "overlong_buffer": overlong_buffer, "none": none}
        self._engines = PolicyEngines(policy=policy.engine, rollout=rollout.engine)
        self._limits, self._environment, conversations = dict[str, Any](), dict[str, str](), None
        if environment is not None or tools:
            factory = rollout.environment_of(rows.rows, environment, tools, parse)
            self._limits = {"max_turns": max_turns, "max_tokens": max_tokens}
            self._environment = {"environment": fingerprint_of(factory)}
            how: dict[str, Any] = {**self._limits, "step_timeout": step_timeout, "processes": processes}
            conversations = talking(rollout.engine, factory, rollout.model.tokenizer, sampling.max_new_tokens, **how)
        else:
            of_turns: dict[str, Any] = {"parse": parse, "max_turns": max_turns, "max_tokens": max_tokens}
            of_turns |= {"step_timeout": step_timeout, "processes": processes}
            require_default(of_turns, (None, 4, None, 60.0, 0), "without an environment or tools")
            name_unread(rollout.model, rows.rows)
        self._sampler = self._options.sampler(
            rollout.engine,
            tokenizer=rollout.model.tokenizer,
            rewards=self._rewards,
            stream=rows.stream,
            objective=policy.objective,
            config=config,
            seed=sampling.seed,
            talking=conversations,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sampler.close()
        self._rollout.ahead = None

    def sync(self) -> None:
        """Give the rollout the policy's weights between two steps, for an evaluation: nothing is drawn meanwhile."""
        self._sampler.update(self._engines)

    def groups(self) -> Groups:
        """The groups of the next step, with rewards; the rollout gets the policy's weights where it is time.

        Raises:
            ValueError: a step behind the last one, for which nothing is ever drawn.
        """
        self._sampler.begin_step(self._engines)
        step = self._sampler.next_step
        if step >= self._steps:
            raise ValueError(
                f"this Ahead draws for {self._steps} steps, and these have been: Ahead(…, steps=…) is the number of "
                "steps in which groups() is called, each time once"
            )
        sampled = self._sampler.sample(step)
        phase_ended()
        # Random numbers of the step's loss are those of the plain loop's, too.
        sampling = replace(self._sampling, seed=self._sampler.seed_of(step))
        return Groups(trajectories=sampled.trajectories, sampled=sampled, sampling=sampling, **self._of_groups)

    def parts(self) -> dict[str, Engine | Stateful]:
        """Requests and results up to the rows that are trained on."""
        return {"rollouts": self._sampler}

    def settings(self) -> dict[str, Any]:
        """The sampling, how far rollouts run ahead, and what is made of the rewards."""
        sampling = asdict(self._sampling)
        sampling["stop"] = list(sampling["stop"])
        of_ahead = {"prompts": self._prompts, "ahead": asdict(self._options)}
        of_ahead |= {"conversations": self._limits} if self._limits else {}
        return {"sampling": sampling, **of_ahead, "rewards": json.loads(json.dumps(self._of_rewards))}

    def fingerprints(self) -> dict[str, str]:
        """Hashes of the rows, of the rewards with their weights, and of the environment or the tools."""
        return self.rows.fingerprints() | {"reward": self._rewards.fingerprint} | self._environment
