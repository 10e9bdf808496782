"""A sampler whose rollouts run ahead of training."""

import copy
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from rl_bridge.algorithms.completions import Sampled, baseline_of, rewarded
from rl_bridge.algorithms.policy_setup import PolicyConfig, PolicyEngines, seed_of
from rl_bridge.common.terminal import tell
from rl_bridge.data.messages import Chat
from rl_bridge.data.rows import RowStream
from rl_bridge.data.trajectory import Request, Trajectory
from rl_bridge.engines import InferenceEngine
from rl_bridge.environments.factories import fingerprint_of
from rl_bridge.models.encoding import encode_prompt
from rl_bridge.rewards import Rewards
from rl_bridge.rollout.ahead.environment_turns import Talking, Talks
from rl_bridge.rollout.ahead.lanes import Driver, Lanes
from rl_bridge.rollout.ahead.ledger import Group, Ledger, Sample, emptied, loaded, passed_over, saved
from rl_bridge.rollout.ahead.pumps import Admission, Pace, RolloutPump, TrainingPump
from rl_bridge.rollout.conversations import Opening
from rl_bridge.rollout.decoder import Drawn
from rl_bridge.rollout.rollout_worker import completed
from rl_bridge.rollout.sampling import request_seeds
from rl_bridge.run.provenance import of_rows
from rl_fn import Objective

Result = TypeVar("Result")


class AsPrompt(NamedTuple):
    """A row of the data in the ledger."""

    row: dict[str, Any]
    tokens: list[int]


class AheadSampler:
    """Makes the completions of a step, with prompts of later steps in the rollout while the step is trained on.

    Random numbers depend on the seed, the step and the prompt's place alone, as where nothing runs ahead. Rewards that
    compare completions are asked about the prompts of a step in one call, as there; others as soon as a prompt is
    drawn, in the order of the prompts; without determinism all about whatever waits.
    """

    def __init__(
        self,
        rollout: InferenceEngine,
        *,
        tokenizer: PreTrainedTokenizerBase,
        rewards: Rewards,
        stream: RowStream,
        objective: Objective,
        config: PolicyConfig,
        seed: int,
        admission: Admission,
        pace: Pace,
        lazy: bool = False,
        talking: Talking | None = None,
        patience: float = 3600.0,
    ) -> None:
        """``lazy``: a step begins without new weights in the rollout where its prompts are ready and others run.

        ``talking``: how conversations are held; None: samples are completions. ``patience``: seconds without any
        progress after which a wait fails. ``config`` has one round of dynamic sampling: rewards of a further one would
        decide what may be drawn ahead.
        """
        self.rewards, self.stream, self._config, self._seed = rewards, stream, config, seed
        self._making: dict[str, Any] = {
            "scalar": config.scalar,
            "overlong_buffer": config.overlong_buffer,
            "max_new_tokens": config.sampling.max_new_tokens,
        }
        self._greedy = "greedy_rewards" in objective.required_rollout_fields
        self._samples = config.sampling.n + self._greedy
        """Completions of a prompt: those to train on, and a greedy one where the objective reads its rewards."""
        # The trainer's thread uses the other one.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._admission, self._pace, self._lazy = admission, pace, lazy
        self._lanes = Lanes(rollout, replace(config.sampling, n=1), self._samples)
        self._patience, self._talking = patience, talking
        # Of the environment's file as it is now: edits are for another run.
        self._environment = None if talking is None else fingerprint_of(talking.environment)
        self._talks: Talks | None = None
        self._ledger, self._step, self._training = Ledger(), 0, False
        self._weights: dict[int, int] = {}
        """Version of the policy → of its weights, as engines count them."""
        self._places: dict[int, dict[str, Any]] = {}
        """Untrained prompt → where the stream was before it."""
        self._skips: dict[int, int] = {}
        """Prompt → rows of the stream right before its own that are trained on, where a ledger was begun among them."""
        self._driver: Driver | None = None
        self._waited = 0.0

    def seed_of(self, step: int) -> int:
        """The seed of a step's random numbers."""
        return seed_of(self._seed, step)

    @property
    def next_step(self) -> int:
        """The step that ``sample`` is to be asked for."""
        return self._started().training.step

    def begin_step(self, engines: PolicyEngines) -> None:
        """``update``, or leave the rollout at work where that is lazy."""
        self._engines = engines
        self._end_step()
        if not self._lazy or self._waiting(self._started().could_update):
            self.update(engines)

    def update(self, engines: PolicyEngines) -> None:
        """Let the rollout stop where its pace has it, and give it the policy's weights."""
        self._end_step()
        driver = self._started()
        self._waiting(driver.hold)
        engines.policy.sync_weights(engines.rollout)
        self._weights[driver.training.step] = engines.rollout.weights_version

    def sample(self, step: int) -> Sampled:
        """The groups of a step, as the ledger has them next."""
        driver = self._started()
        assert step == driver.training.step, f"step {step} after {driver.training.step} steps"
        while True:
            if driver.pump.held:
                driver.release(step)
            groups = self._waiting(driver.take)
            if groups is not None:
                break
            self.update(self._engines)
        self._training = True
        by_group, n = [self._trajectories(group, place) for place, group in enumerate(groups)], self._samples
        trajectories = [trajectory for group in by_group for trajectory in group[: n - self._greedy]]
        baseline = None
        if self._greedy:
            baseline = baseline_of([group[-1] for group in by_group], self.rewards, **self._making)
        if self._talks is not None and all(trajectory.finish_reason == "error" for trajectory in trajectories):
            cause = self._talks.failures[-1] if self._talks.failures else "before the run was taken up again"
            raise ValueError(f"the environment failed in all {len(trajectories)} conversations of step {step}; {cause}")
        sampled = rewarded(trajectories, self.rewards, self._config.sampling.n, greedy=baseline, **self._making)
        sampled = replace(sampled, ahead=self._metrics(groups, step))
        self._forget()
        return sampled

    def checkpoint_state(self) -> dict[str, Any]:
        """Requests and results, up to the prompts that are trained on."""
        self._end_step()
        driver = self._started()
        if self._pace.deterministic:
            driver.hold()
        with driver.changed:
            head = self._ledger.head
            return {
                "ledger": saved(self._ledger),
                "rewards": self.rewards.checkpoint_state(),
                "step": driver.training.step,
                "weights": [list(pair) for pair in self._weights.items()],
                "stream": self._places.get(head) or self.stream.checkpoint_state(),
                "skips": [[number, count] for number, count in self._skips.items() if number >= head],
                "settings": self._settings,
                "bound": self._bound,
                "rows": _digest(self._ledger),
            }

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Go on with what ``checkpoint_state`` gave, before the first step.

        Where groups would be others by the settings of now, those that are not trained on are drawn again: from the
        next step's first prompt on, with a line that names the settings.

        Raises:
            ValueError: other rows. The next step is that of ``state`` all the same, with the first row.
        """
        assert self._driver is None, "a checkpoint is loaded before the first step"
        old, first = state["ledger"], state["step"] * self._config.prompts_per_step
        self._step, self._ledger = state["step"], emptied(old, first)
        self.stream.load_checkpoint_state(state["stream"])
        skips = dict(state.get("skips", ()))
        changes = self._changes(state) or self._take_over(state, skips)
        if not changes:
            return
        self.stream.load_checkpoint_state(state["stream"])
        self._places, self._skips = {}, passed_over(old, skips, first)
        if count := len(old["groups"]):
            tell(f"{count} prompts that were ahead of step {self._step} are drawn again: {'; '.join(changes)}")

    def _changes(self, state: dict[str, Any]) -> list[str]:
        """A phrase for each setting of now by which the groups of ``state`` would be others."""
        old, before = state["ledger"], state.get("settings", {})  # a checkpoint of an earlier version has none
        if changes := _differences(before, self._settings):
            return changes
        admitted = {group["number"]: group["admitted"] for group in old["groups"]}
        if not self._admission.too_old(admitted, old["taken"]):
            return []
        return _differences(state.get("bound", {}), self._bound) or [f"max_staleness is {self._bound['max_staleness']}"]

    def _take_over(self, state: dict[str, Any], skips: dict[int, int]) -> list[str]:
        """Go on with the ledger of ``state``; a phrase where its groups are of other rows or prompts than those."""
        self._skips = skips
        numbers = [group["number"] for group in state["ledger"]["groups"]]
        # Prompts that are trained on already lie among them, where a step may pass over a prompt.
        untrained = range(numbers[0], state["ledger"]["opened"]) if numbers else ()
        prompts = {number: self._prompt(number)[0] for number in untrained}
        ledger = loaded(state["ledger"], prompts.__getitem__)
        # Earlier versions have the mark under another name, or none.
        if state.get("rows", state.get("prompts", digest := _digest(ledger))) != digest:
            return ["their rows, or the tokens of their prompts, are others"]
        self._ledger, self._weights = ledger, dict(state["weights"])
        if "rewards" in state:  # a checkpoint of an earlier version has none
            self.rewards.load_checkpoint_state(state["rewards"])
        return []

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """Settings that decide what a group is, in the types of JSON."""
        limits = None if self._talking is None else self._talking.limits
        sampling = asdict(self._config.sampling) | {"stop": list(self._config.sampling.stop)}
        return {
            "prompts_per_step": self._config.prompts_per_step,
            **{f"sampling.{name}": value for name, value in sampling.items() if name != "seed"},
            "greedy completions": self._greedy,
            "partial": self._pace.partial,
            "deterministic": self._pace.deterministic,
            "max_turns": None if limits is None else limits.max_turns,
            "max_tokens": None if limits is None else limits.all_tokens,
            "seed": self._seed,
            "environment": self._environment,
            "the reward's fingerprint": self.rewards.fingerprint,
            "none": self.rewards.none,
        }

    @property
    def _bound(self) -> dict[str, int]:
        """Settings of the bound: groups stay as they are under another one, as long as it holds for them."""
        return {"max_staleness": self._admission.max_staleness, "window": self._admission.window}

    def close(self) -> None:
        """End the threads."""
        if self._driver is not None:
            self._driver.close()

    def _started(self) -> Driver:
        if self._driver is None:
            talking = self._talking
            options: Any = {"talks": talking is not None, "greedy": self._greedy}
            # Greedy samples are asked about behind all others of a step, as where nothing runs ahead.
            options["apart"] = self.rewards.apart and not self._greedy
            pump = RolloutPump(self._ledger, self._admission, self._pace, self._prompt, **options)
            training = TrainingPump(self._ledger, self._admission, self._step)
            self._talks = None if talking is None else Talks(talking, self._opening)
            self._driver = Driver(
                self._lanes, pump, training, self._rewards_of, talks=self._talks, patience=self._patience
            )
        return self._driver

    def _end_step(self) -> None:
        """The step that was begun, if one was, is over."""
        if self._training:
            self._training = False
            self._started().trained()

    def _waiting(self, wait: Callable[[], Result]) -> Result:
        """The result of a wait, its seconds counted."""
        began = time.monotonic()
        try:
            return wait()
        finally:
            self._waited += time.monotonic() - began

    def _prompt(self, number: int) -> tuple[AsPrompt, list[int]]:
        """The next row of the stream, and the seeds of its samples."""
        self._places[number] = self.stream.checkpoint_state()
        row = self.stream.take(1 + self._skips.get(number, 0))[-1]
        seeds = request_seeds([self._id(number)], self._samples)[0].tolist()
        # A conversation's first tokens are its environment's.
        tokens = [] if self._talking is not None else encode_prompt(self._tokenizer, Chat.of(row))
        return AsPrompt(row, tokens), seeds

    def _id(self, number: int) -> tuple[int, int]:
        """Id of the request: that of the step and place which the prompt has where nothing runs ahead."""
        step, place = divmod(number, self._config.prompts_per_step)
        return self.seed_of(step), place

    def _rewards_of(self, groups: Sequence[Group]) -> list[list[dict[str, float]]]:
        trajectories, n = [self._trajectories(group, place) for place, group in enumerate(groups)], self._samples
        # Greedy ones by themselves, as where nothing runs ahead: a reward may compare what it is given together.
        calls = [slice(n - 1), slice(n - 1, n)] if self._greedy else [slice(n)]
        rewards_of: list[list[dict[str, float]]] = [[] for _ in groups]
        for part in calls:
            scored = iter(
                self.rewards.score([trajectory for of_group in trajectories for trajectory in of_group[part]])
            )
            for of_group, values in zip(trajectories, rewards_of, strict=True):
                values += [dict(next(scored).rewards) for _ in of_group[part]]
        return rewards_of

    def _opening(self, group: Group, number: int, place: int = 0) -> Opening:
        seed, row = group.samples[number].seed, group.prompt.row
        return Opening(request_id=(*self._id(group.number), number), seed=seed, row=row, group=place)

    def _conversation(self, group: Group, number: int, place: int) -> Trajectory:
        """The environment's own reward stays until the rewards were asked, which see it."""
        assert self._talking is not None
        sample, template = group.samples[number], self._talking.template
        versions = self._versions(sample)
        talk = self._talking.conversation(self._opening(group, number, place), sample, versions)
        conversation = talk.trajectory(sample.reason, template.end_token)  # type: ignore[arg-type]
        return replace(conversation, rewards=sample.rewards or conversation.rewards)

    def _trajectories(self, group: Group, place: int) -> list[Trajectory]:
        if self._talking is not None:
            return [self._conversation(group, number, place) for number in range(len(group.samples))]
        prompt: AsPrompt = group.prompt
        request = Request(Chat.of(prompt.row).shortest, self._id(group.number), place)
        trajectories = []
        for number, sample in enumerate(group.samples):
            trajectory = completed(
                self._tokenizer,
                request,
                number,
                prompt=prompt.tokens,
                drawn=_as_drawn(sample),
                version=self._versions(sample),
                stop=self._config.sampling.stop,
            )
            trajectories.append(trajectory.labelled(row=prompt.row, rewards=sample.rewards))
        return trajectories

    def _versions(self, sample: Sample) -> list[int]:
        return [self._weights[version] for version in sample.versions]

    def _metrics(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Ages of the step's tokens in versions, and the seconds that trainer and rollout waited."""
        driver = self._started()
        samples = [sample for group in groups for sample in group.samples if not sample.greedy]
        ages = torch.tensor([float(step - version) for sample in samples for version in sample.versions] or [0.0])
        idle, driver.idle = driver.idle, 0.0
        waited, self._waited = self._waited, 0.0
        return {
            "staleness": float(ages.mean()),
            "staleness_max": float(ages.max()),
            "versions_per_completion": sum(len(sample.spans) for sample in samples) / len(samples),
            "aborted": sum(sample.reason == "abort" for sample in samples) / len(samples),
            "trainer_idle_seconds": waited,
            "rollout_idle_seconds": idle,
        }

    def _forget(self) -> None:
        """Forget prompts and versions that no untrained prompt has."""
        driver = self._started()
        with driver.changed:
            oldest = min((group.admitted for group in self._ledger.groups.values()), default=driver.pump.version)
            self._places = {number: place for number, place in self._places.items() if number >= self._ledger.head}
            self._weights = {version: weights for version, weights in self._weights.items() if version >= oldest}


def _digest(ledger: Ledger) -> str:
    """A hash of the rows and the tokens of all untrained prompts."""
    prompts = [group.prompt for group in ledger.groups.values()]
    content = of_rows([prompt.row for prompt in prompts]), [prompt.tokens for prompt in prompts]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A phrase for each value that is another one; a name that was not there before says nothing."""
    return [f"{name} was {before[name]} and is {now[name]}" for name in now if before.get(name, now[name]) != now[name]]


def _as_drawn(sample: Sample) -> Drawn:
    reason: Any = sample.reason
    return Drawn(None, sample.tokens, sample.logprobs, sample.allowed, reason)
