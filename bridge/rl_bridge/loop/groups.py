"""``Groups``: prompts with their completions and rewards; and the batch that a policy is updated on."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

import rl_fn
from rl_bridge.algorithms.advantages import (
    CONTROLLED,
    SCORED_BY,
    Advantages,
    require_scored,
    require_whole,
    with_reward_weights,
)
from rl_bridge.algorithms.completions import Sampled, baseline_of, failures, joined, rewarded
from rl_bridge.algorithms.evaluation import interval, pass_rates_of, require_ended, with_ends
from rl_bridge.algorithms.policy_setup import ScalarOptions
from rl_bridge.common.argument_kinds import check_call, require_default
from rl_bridge.data.token_batch import TokenBatch, collate
from rl_bridge.data.trajectory import SamplingParams, Trajectory
from rl_bridge.functional import from_jax
from rl_bridge.loop.changes import note_evaluation
from rl_bridge.loop.places import places_of
from rl_bridge.models.pretrained import require_vocabulary
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.rewards import RewardError, Rewards, load
from rl_bridge.rewards.rewards import OnNone
from rl_bridge.rewards.sources import Source


class Draw(NamedTuple):
    """One call that drew completions, as far as an update looks at it."""

    seed: int
    when: int
    """Its place among draws and updates."""
    weights_of: object
    """The object whose weights drew (``Policy.weights_of``)."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """P prompts with n completions each, prompt by prompt. ``Rollout.generate`` makes them.

    >>> groups = rollout.generate(rows.take(2), SamplingParams(n=4, max_new_tokens=8))  # doctest: +SKIP
    >>> groups = groups.score(lambda completion, row: len(completion))  # doctest: +SKIP
    >>> groups.rewards.shape  # doctest: +SKIP
    torch.Size([2, 4])
    >>> batch = groups.batch().with_advantages(rl_fn.recipes.grpo())  # doctest: +SKIP
    """

    trajectories: list[Trajectory]
    """Tokens, log-probabilities and the row of each completion."""
    sampling: SamplingParams
    """How the completions were sampled; ``sampling.n`` is the number of a prompt's completions."""
    pad_token: int
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False, compare=False)
    """That of the model that drew them, by which a token is an id; None where nobody drew."""
    sampled: Sampled | None = None
    """The rewards in all forms, after ``score``."""
    exact: bool = True
    """Whether the rollout computes as a trainer in float32 does."""
    drawn: int | None = None
    """When they were drawn, among draws and updates; None where weights may be older by design (``Ahead``)."""
    weights_of: object = None
    """The object whose weights drew them (``Policy.weights_of``); None if nobody gave the rollout weights."""
    scored_by: "ScoredBy | None" = field(default=None, repr=False)
    """The rewards that ``score`` was called with, and what it made of these."""
    joined_draws: tuple[Draw | None, ...] = field(default=(), repr=False)
    """The call that drew each prompt's completions, of joined groups; None as for ``drawn``."""

    @property
    def draw_of(self) -> tuple[Draw | None, ...]:
        """The call that drew the completions of each prompt; None where weights may be older by design (``Ahead``)."""
        own = None if self.drawn is None else Draw(self.sampling.seed, self.drawn, self.weights_of)
        return self.joined_draws or (own,) * (len(self.trajectories) // self.sampling.n)

    @property
    def draws(self) -> list[tuple[Draw, list[Trajectory]]]:
        """The calls that drew these, each with those of its completions that are left."""
        n = self.sampling.n
        calls: dict[tuple[int, int], tuple[Draw, list[Trajectory]]] = {}
        for place, one in enumerate(self.draw_of):
            if one is not None:
                calls.setdefault(one[:2], (one, []))[1].extend(self.trajectories[place * n : (place + 1) * n])
        return list(calls.values())

    @property
    def rewards(self) -> torch.Tensor:
        """[P, n]: what the policy is trained on.

        Raises:
            ValueError: the groups have not been scored.
        """
        return self.scored.rewards

    @property
    def valid(self) -> torch.Tensor:
        """[P, n]: False where a completion counts nowhere.

        Its environment failed, the rollout gave up, no reward applies, or ``select`` left it out.
        """
        return self.scored.valid

    @property
    def scored(self) -> Sampled:
        """The rewards in all forms.

        Raises:
            ValueError: the groups have not been scored.
        """
        if self.sampled is None:
            raise ValueError("these groups have no rewards yet: groups = groups.score(reward)")
        return self.sampled

    def score(
        self,
        reward: Source | Sequence[Source] | Rewards,
        weights: Sequence[float] = (),
        *,
        scalar: ScalarOptions | None = None,
        overlong_buffer: int | None = None,
        none: OnNone = "refuse",
        greedy: "Groups | None" = None,
    ) -> "Groups":
        """The groups with rewards.

        ``reward`` is what ``--reward`` takes: a function in any of the known forms, ``FILE.py:function``, ``exact``,
        ``environment``, ``model:FOLDER``, ``judge:FILE.toml``, an address, or a list of these. ``weights`` and
        ``scalar`` make one number of several rewards. ``overlong_buffer``: DAPO's penalty of long completions. ``none``
        "leave-out": a reward that returns None does not apply to a completion, as to another task's rows; a completion
        that no reward applies to is in no group's statistics and in no loss, and ``metrics`` counts it (unrewarded).
        ``greedy``: one completion of each prompt at temperature 0, whose reward is the group's baseline (ReMax).

        Raises:
            RewardError: a reward that raises, hangs, dies or returns no finite number: its name and the row.
            ValueError: greedy completions of other prompts, or that are not greedy.
        """
        check_call(Groups.score, locals())
        rewards = loaded_rewards(reward, weights, none)
        making: dict[str, Any] = {"scalar": ScalarOptions() if scalar is None else scalar}
        making |= {"overlong_buffer": overlong_buffer, "max_new_tokens": self.sampling.max_new_tokens}
        baseline = None
        if greedy is not None:
            self._require_baseline(greedy)
            baseline = baseline_of(rewards.score(greedy.trajectories), rewards, **making)
        sampled = rewarded(rewards.score(self.trajectories), rewards, self.sampling.n, greedy=baseline, **making)
        if self.sampled is not None:  # what was left out stays so
            earlier = self.sampled
            sampled = replace(sampled, chosen=earlier.chosen, sampled_groups=earlier.sampled_groups)
        scored_by = ScoredBy(rewards=rewards, options={**making, "scalar": asdict(making["scalar"]), "none": none})
        return replace(self, trajectories=sampled.trajectories, sampled=sampled, scored_by=scored_by)

    def settings(self) -> dict[str, Any]:
        """How these were sampled, without the seed, and scored: numbers, texts, and the fingerprint of the rewards.

        >>> groups = Groups(trajectories=[], sampling=SamplingParams(n=4, max_new_tokens=8), pad_token=0)
        >>> groups.settings()["sampling.n"]
        4
        """
        sampling = {f"sampling.{name}": value for name, value in asdict(self.sampling).items() if name != "seed"}
        return sampling | ({} if self.scored_by is None else self.scored_by.settings())

    def _require_baseline(self, greedy: "Groups") -> None:
        """Refuse a baseline that is not of these prompts, each with one greedy completion."""
        if greedy.sampling.temperature or greedy.sampling.n != 1:
            raise ValueError(
                "a baseline is one greedy completion of each prompt, SamplingParams(temperature=0.0), got "
                f"n={greedy.sampling.n} at temperature {greedy.sampling.temperature}"
            )
        if [t.prompt_tokens for t in greedy.trajectories] != [
            t.prompt_tokens for t in self.trajectories[:: self.sampling.n]
        ]:
            raise ValueError("the greedy completions are of other prompts than these groups, or in another order")

    def batch(self) -> "GroupBatch":
        """The completions as tensors; π_old is what the rollout sampled from, until ``policy.score`` says better.

        Raises:
            ValueError: the groups have not been scored, or none is left.
        """
        if not self.scored.trajectories:
            raise ValueError(
                "there are no groups to make a batch of: select left none of the prompts. A step without an update "
                "is logged all the same: if not groups.trajectories: run.log(…); continue"
            )
        tokens = collate(self.scored.trajectories, self.pad_token)
        return GroupBatch(groups=self, tokens=tokens._replace(old_logprobs=tokens.rollout_logprobs))

    def select(self, prompts: Sequence[int] | Sequence[bool] | torch.Tensor) -> "Groups":
        """The prompts of these places with their completions; or of a mask, with True for each that is chosen.

        A mask [P, n] is of completions: groups may then be of unlike sizes. The others count nowhere, neither in a
        group's statistics nor in a loss; a prompt without any is gone. ``metrics`` has the share of those that are left
        out of the prompts that stay (left_out).

        >>> groups = groups.select(groups.rewards.std(1) > 0)  # those whose rewards differ  # doctest: +SKIP
        >>> groups = groups.select(~groups.truncated)  # completions that ended by themselves  # doctest: +SKIP

        Raises:
            ValueError: the groups have not been scored; or places that are none, or that come twice.
            TypeError: neither places nor a mask.
        """
        prompts = list(range(len(self.rewards)))[prompts] if isinstance(prompts, slice) else prompts
        sampled, chosen = self.scored, torch.as_tensor(prompts)
        if chosen.shape == self.rewards.shape and chosen.dtype == torch.bool:
            chosen = chosen.cpu() if sampled.chosen is None else chosen.cpu() & sampled.chosen
            sampled, prompts = replace(sampled, chosen=chosen), chosen.any(1)
        places = places_of(prompts, len(self.rewards))
        sampled, draws = sampled.rows(places), tuple(self.joined_draws[i] for i in places if self.joined_draws)
        return replace(self, trajectories=sampled.trajectories, sampled=sampled, joined_draws=draws)

    @property
    def truncated(self) -> torch.Tensor:
        """[P, n]: whether a completion was cut at ``max_new_tokens`` or another limit."""
        cut = [trajectory.finish_reason == "length" for trajectory in self.trajectories]
        return torch.tensor(cut, dtype=torch.bool).view(-1, self.sampling.n)

    def with_signal(self, objective: rl_fn.Objective) -> "Groups":
        """The prompts that dynamic sampling keeps, as those whose rewards differ; all where the objective has none.

        >>> groups = Groups.joined([groups.with_signal(objective), more.with_signal(objective)])  # doctest: +SKIP

        Raises:
            ValueError: the groups have not been scored.
        """
        if objective.dynamic_sampling is None:
            return self
        mask = torch.ones((*self.rewards.shape, 1), dtype=torch.bool)
        rollouts: Any = rl_fn.Rollouts(self.rewards, mask, valid=self.valid)  # type: ignore[arg-type]
        return self.select(_kept(objective)(rollouts).any(1))

    @staticmethod
    def joined(parts: Sequence["Groups"]) -> "Groups":
        """All prompts of several scored groups, numbered anew: one batch, and one update with one denominator.

        Raises:
            ValueError: no parts; or some that were sampled in another way or by the same seed, that were not scored, or
                that have a completion in common, which would count twice; or of models with other vocabularies.
        """
        if not parts:
            raise ValueError("there are no groups to join")
        first = parts[0]
        named = [(part.pad_token, part.scored.names, part.scored.turn_weight) for part in parts]
        alike = [(replace(part.sampling, seed=0), *name) for part, name in zip(parts, named, strict=True)]
        if strange := [way for way in alike if way != alike[0]]:
            raise ValueError(f"groups that are joined are sampled and scored alike, got {alike[0]} and {strange[0]}")
        _require_scored_alike(parts)
        calls = {one[:2] for part in parts for one, _ in part.draws}
        seed, count = Counter(seed for seed, _ in calls).most_common(1)[0] if calls else (0, 0)
        if count > 1 and first.sampling.temperature:
            raise ValueError(
                f"{count} of the joined groups have the seed {seed}, and drew by the same random numbers at each "
                "place: give each generate of a step a seed of its own, as step + (round << 48)"
            )
        drawn = Counter(mark for part in parts for mark in _marks(part))
        if twice := [request for (_, request), times in drawn.items() if times > 1]:
            raise ValueError(f"{len(twice)} completions stand in two of the joined groups, and would count twice")
        for part in parts:
            if first.tokenizer is not None and part.tokenizer is not None:
                require_vocabulary(first.tokenizer, part.tokenizer, kind="first of the groups", of_other="another one")
        sampled = joined([part.scored for part in parts])
        sampled = replace(sampled, sampled_groups=sum(part.scored.sampled_groups for part in parts))
        exact, draws = all(part.exact for part in parts), tuple(one for part in parts for one in part.draw_of)
        return replace(first, trajectories=sampled.trajectories, sampled=sampled, exact=exact, joined_draws=draws)

    def metrics(self) -> dict[str, float]:
        """Means of rewards and tokens, the share that was cut at max_new_tokens, and the share that failed."""
        return self.scored.metrics()

    def held_out(self, *, pass_at: Sequence[int] = (), correct_reward: float = 1.0) -> dict[str, float]:
        """Metrics of an evaluation: the mean reward over prompts that are not trained on, with its bootstrap interval.

        ``pass_at``: k of pass@k, the chance that one of k completions earns ``correct_reward``, the overlong penalty
        aside. ``rl-fn report`` shows these metrics, and ``run.keep_best("held_out")`` goes by the mean. Completions
        that failed, and those that no reward applies to, are in none of these; the former are counted
        (held_out_errors, held_out_aborted).

        >>> greedy = SamplingParams(max_new_tokens=64, temperature=0.0)  # doctest: +SKIP
        >>> rollout.generate(held_out, greedy).score(reward).held_out()  # doctest: +SKIP
        {'held_out': 0.5, 'held_out_low': 0.25, 'held_out_high': 0.75}

        Raises:
            ValueError: the groups have not been scored, or a k above the number of a prompt's completions.
            RewardError: every completion failed, or no reward applies to any.
        """
        rewards, valid = self.rewards, self.valid
        if pass_at and max(pass_at) > rewards.shape[1]:
            raise ValueError(f"pass@{max(pass_at)} needs {max(pass_at)} completions a prompt, got {rewards.shape[1]}")
        require_ended(self.trajectories)
        if not bool(valid.any()):
            raise RewardError(f"no reward applies to any of the {valid.numel()} held-out completions")
        note_evaluation(self.trajectories, {**self.settings(), "pass_at": [*pass_at], "correct_reward": correct_reward})
        # The mean of the completions that count, of the prompts that have such a completion.
        some = rewards.masked_fill(~valid, torch.nan)[valid.any(1)]
        scores = (rewards.mean(1) if bool(valid.all()) else some.nanmean(1)).tolist()
        earned = self.scored.earned.masked_fill(~valid, torch.nan)
        named = {"held_out": interval(scores)} | pass_rates_of(earned, pass_at, correct_reward)
        failed = {f"held_out_{name}": share for name, share in failures(self.trajectories).items()}
        return with_ends(named) | {"held_out": sum(scores) / len(scores)} | failed


@dataclass(frozen=True, kw_only=True)
class ScoredBy:
    """How completions got their rewards."""

    rewards: Rewards
    options: Mapping[str, Any]
    """Those of ``Groups.score``."""

    def way(self) -> dict[str, Any]:
        """The weights that count, and the options that change a number: a reward that applies is the same ``none``."""
        scalar = self.options["scalar"]
        changing = {name: value for name, value in self.options.items() if name != "none"}
        return changing | {"scalar": scalar | {"weights": ()}, "weights": scalar["weights"] or self.rewards.weights}

    def settings(self) -> dict[str, Any]:
        """The options of ``score`` by name, and the fingerprint of the rewards' files, names and weights."""
        options = {f"score.{name}": value for name, value in self.options.items() if name != "max_new_tokens"}
        return options | {"the reward or its file": _fingerprint(self.rewards)}


@dataclass(frozen=True, kw_only=True)
class GroupBatch:
    """Completions of ``groups`` as tensors [N, L], with what models and an objective say of each token."""

    groups: Groups
    tokens: TokenBatch
    computed: torch.Tensor | None = None
    """[N]: rows that the loss needs; None before ``with_advantages``."""
    counted: torch.Tensor | None = None
    """[N, L]: tokens in the denominator."""
    scorings: Mapping[str, ScoringConfig] = field(default_factory=dict)
    """How the models beside the policy scored: ``reference``, ``teacher``."""
    objective: rl_fn.Objective | None = None
    """The objective whose advantages these are."""
    coefficients: Mapping[str, float] = field(default_factory=dict)
    """The coefficients that the advantages were made with, where a controller sets any."""
    rescored: bool = False
    """Whether π_old is the trainer's (``policy.score``), and not what the rollout sampled from."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the advantages were measured by."""
    partly: frozenset[str] = frozenset()
    """Fields of the tokens that a model gave behind the advantages, of the rows that these left in the loss alone."""

    def with_fields(self, **fields: Any) -> "GroupBatch":
        """The batch with other fields of its tokens."""
        return replace(self, tokens=self.tokens._replace(**fields))

    def scored_in_loss(self, name: str) -> "GroupBatch":
        """The batch with a note that ``name`` is of the rows in the loss alone, where advantages chose these."""
        whole = self.computed is None or bool(self.computed.all())
        return replace(self, partly=self.partly - {name} if whole else self.partly | {name})

    def with_scoring(self, kind: str, scoring: ScoringConfig) -> "GroupBatch":
        """The batch with how a model of this ``kind`` scored."""
        return replace(self, scorings={**self.scorings, kind: scoring})

    def with_advantages(
        self,
        objective: rl_fn.Objective,
        *,
        correct_reward: float = 1.0,
        coefficients: Mapping[str, float] | None = None,
    ) -> "GroupBatch":
        """The batch with the objective's advantages and returns, and the tokens that the loss counts.

        ``correct_reward``: from which reward on a completion is correct, for losses that read that. ``coefficients``:
        ``policy.coefficients``, where the policy has a controller of the KL that is taken off the rewards.

        Raises:
            TypeError: no objective of groups.
            ValueError: the advantages read log-probabilities or values that no model has given yet, or not of all rows;
                or a coefficient of a term that the objective does not have; or rewards whose weights the objective
                could not take.
        """
        if not isinstance(objective, rl_fn.Objective):
            raise TypeError(f"advantages are of an objective, as rl_fn.recipes.grpo(), got {objective!r}")
        sampled = self.groups.scored
        penalised = len(sampled.names) > sampled.applies.shape[1]
        advantages = _advantages(with_reward_weights(objective, sampled.weights, penalised=penalised))
        tokens, terms = self.tokens, dict(coefficients or {})
        present = {"ref_logprobs": tokens.ref_logprobs, "values": tokens.old_values}
        present |= {"teacher_logprobs": tokens.teacher_logprobs, "greedy_rewards": sampled.greedy_rewards}
        require_scored(objective, objective.required_rollout_fields, present)
        require_whole(objective, self.partly)
        if strange := [name for name in terms if getattr(objective, name, None) is None or name not in CONTROLLED]:
            raise ValueError(
                f"{objective.name} has no term {strange[0]!r} with a coefficient: coefficients=policy.coefficients are "
                f"of {', '.join(CONTROLLED)}"
            )
        seed = self.groups.sampling.seed
        batch = advantages.marked(self.tokens, sampled, correct_reward=correct_reward, seed=seed)
        batch, computed, counted = advantages.advantages(batch, sampled, terms)
        metrics = {"informative": float(computed.float().mean())} | advantages.metrics(batch, sampled)
        of_objective: dict[str, Any] = {"computed": computed, "counted": counted, "objective": objective}
        return replace(self, tokens=batch, metrics=metrics, coefficients=terms, **of_objective)


def require_batch(batch: Any) -> None:
    """Refuse groups that are no tensors yet, and whatever else a model does not score.

    Raises:
        TypeError: with the way on.
    """
    if not isinstance(batch, GroupBatch):
        way_on = ": groups.batch() makes one, once they are scored" if isinstance(batch, Groups) else ""
        raise TypeError(f"a model scores a batch of groups, and not a {type(batch).__name__}{way_on}")


def _require_scored_alike(parts: Sequence[Groups]) -> None:
    """Refuse to join rewards that are not made alike: of other weights or options, or with a baseline in some alone.

    Raises:
        ValueError: with both.
    """
    ways = [by.way() for by in (part.scored_by for part in parts) if by is not None]
    for way in ways:
        if strange := [name for name, value in way.items() if value != ways[0].get(name)]:
            before, other = ({name: values.get(name) for name in strange} for values in (ways[0], way))
            raise ValueError(f"groups that are joined are scored alike, got {before} and {other}")
    without = sum(part.scored.greedy_rewards is None for part in parts)
    if 0 < without < len(parts):
        raise ValueError(
            f"{without} of the {len(parts)} joined groups have no greedy rewards, and the others have: give each "
            f"{SCORED_BY['greedy_rewards']}, or none"
        )


def _marks(part: Groups) -> set[tuple[int | None, tuple[int, ...]]]:
    """Each completion as the call that drew it and its request."""
    calls = [None if one is None else one.when for one in part.draw_of for _ in range(part.sampling.n)]
    return {(call, t.request_id) for call, t in zip(calls, part.trajectories, strict=True) if t.request_id}


def loaded_rewards(
    reward: Source | Sequence[Source] | Rewards, weights: Sequence[float] = (), none: OnNone = "refuse"
) -> Rewards:
    """The rewards that ``reward`` names, with the ``weights`` of several.

    Raises:
        TypeError: no reward.
        ValueError: weights of ``Rewards``, which have their own.
    """
    if isinstance(reward, Rewards):
        require_default({"weights": tuple(weights), "none": none}, ((), "refuse"), "with Rewards, which have their own")
        return reward
    if not (isinstance(reward, str | Sequence) or callable(reward)):
        raise TypeError(f"a reward is a function, a text as --reward takes, or a list of these, got {reward!r}")
    several = (reward,) if isinstance(reward, str) or callable(reward) else reward
    return _loaded(tuple(map(_Source, several)), tuple(weights), none)


class _Source:
    """A source as a key: an object that cannot be hashed, as of a dataclass that is not frozen, is itself alone."""

    def __init__(self, source: Source) -> None:
        self.source = source
        try:
            self._key: Any = hash(source), source
        except TypeError:
            self._key = id(source), None

    def __hash__(self) -> int:
        return self._key[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Source) and self._key == other._key


@lru_cache(maxsize=16)
def _loaded(sources: tuple[_Source, ...], weights: tuple[float, ...], none: OnNone) -> Rewards:
    """The rewards, loaded once: files and processes stay open from step to step."""
    return load([key.source for key in sources], weights=weights, none=none)


@lru_cache(maxsize=16)
def _fingerprint(rewards: Rewards) -> str:
    """The fingerprint of the rewards' files and names, read once."""
    return rewards.fingerprint


@lru_cache(maxsize=16)
def _kept(objective: rl_fn.Objective) -> Callable[..., torch.Tensor]:
    """Which tokens dynamic sampling keeps, traced once."""
    dynamic: Any = objective.dynamic_sampling
    return from_jax(dynamic.kept)


@lru_cache(maxsize=16)
def _advantages(objective: rl_fn.Objective) -> Advantages:
    """The objective's functions, traced once."""
    return Advantages(objective)
