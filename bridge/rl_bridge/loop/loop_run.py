"""``Run``: the steps of a loop in a folder, logged, checkpointed, and taken up again bit for bit."""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from rl_bridge.algorithms.completion_log import CompletionLog
from rl_bridge.common.argument_kinds import check_call, require_kind
from rl_bridge.common.scalars import Measured, json_of, number_of, numbers_of
from rl_bridge.common.terminal import remark, remarks, tell
from rl_bridge.data.census import Census
from rl_bridge.engines.engine import Engine
from rl_bridge.executors.session import current_executor
from rl_bridge.loop.ahead import Ahead
from rl_bridge.loop.changes import Part, changed, names_of, noted
from rl_bridge.loop.data import Rows
from rl_bridge.loop.groups import Groups
from rl_bridge.loop.scored import AdamW, Metrics, Scored
from rl_bridge.loop.trained import Policy
from rl_bridge.memory.garbage_collection import collector_waits, phase_ended
from rl_bridge.pipelines.placement import keep_threads
from rl_bridge.run import run
from rl_bridge.run.options import RunOptions
from rl_bridge.run.run import Observer, Stateful, open_run


@dataclass(frozen=True, kw_only=True)
class LoopOptions(RunOptions):
    """The options of a loop's run: those of all runs, and the settings of the objects in its state."""

    state: Mapping[str, Any] = field(default_factory=dict)


class Run:
    """A loop's folder ``output/name``: metrics.jsonl, checkpoints, what ``rl-fn report`` shows. A name that is taken
    gets a number.

    ``state`` are the objects that change from step to step: the policy, the rows, a critic, a reference that follows.
    With ``resume`` the loop goes on from the newest checkpoint, with the same numbers to the bit, if ``state`` is whole
    and a step's random numbers are made of its number (``SamplingParams(seed=step)``). Another number of steps, and
    another sampling or reward of the logged groups than before, are named. ``samples_kept`` completions of
    every ``samples_every`` steps (0: of none) are in completions.jsonl, with what the loss had of each token.

    >>> with Run("grpo", state=[policy, rows]) as run:  # doctest: +SKIP
    ...     for step in run.steps(200):
    ...         policy.sync_weights(rollout)
    ...         groups = rollout.generate(rows.take(32), SamplingParams(n=8, max_new_tokens=512, seed=step))
    ...         groups = groups.score(reward)
    ...         run.log(policy.update(groups.batch().with_advantages(objective)), groups)

    Raises:
        ValueError: another process has the folder, there is nothing to resume, or the checkpoint was made with other
            settings, rows or models; the message names each. ``resume_anyway`` goes on all the same.
    """

    def __init__(
        self,
        name: str,
        state: Sequence[Part],
        *,
        output: str | Path = "runs",
        resume: bool = False,
        resume_anyway: bool = False,
        checkpoint_every: int = 50,
        keep_checkpoints: int = 2,
        stop_after_skips: int = 3,
        samples_every: int = 10,
        samples_kept: int = 4,
        observers: Sequence[Observer] = (),
    ) -> None:
        require_kind("state", state, Sequence, _LIST)
        check_call(Run.__init__, locals())
        if samples_every < 0 or samples_kept < 1:
            raise ValueError(f"need samples_every ≥ 0, samples_kept ≥ 1, got {samples_every, samples_kept}")
        if not state:
            raise ValueError("state holds the objects that change from step to step, and is empty")
        for part in state:
            if not hasattr(part, "parts"):
                raise TypeError(
                    f"a {type(part).__name__} is no part of a run's state, which a checkpoint holds: that is the "
                    "policy, the rows, a critic, a reference that follows. A rollout takes its weights of the policy"
                )
            if isinstance(part, Ahead) and part.rows in state:
                raise ValueError(
                    "state holds the rows and Ahead, which saves their place itself: leave the rows out; a stage "
                    "before takes rows of its own, of another load_rows"
                )
        parts = dict(zip(names_of(state), state, strict=True))
        rows = (part.rows if isinstance(part, Ahead) else part for part in state)
        censuses = [part.census for part in rows if isinstance(part, Rows)]
        options = LoopOptions(
            name=name,
            output=Path(output),
            resume=resume,
            resume_anyway=resume_anyway,
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            stop_after_skips=stop_after_skips,
            state={name: dict(part.settings()) for name, part in parts.items() if part.settings()},
        )
        fingerprints: dict[str, str] = {}
        for own, part in parts.items():
            for what, mark in part.fingerprints().items():
                fingerprints[what if fingerprints.get(what, mark) == mark else f"{what} of {own}"] = mark
        counts = {"census": {f"rows {n}": vars(census) for n, census in enumerate(censuses, 1)}} if censuses else {}
        self._begin(options, fingerprints, observers, parts=parts, counts=lambda: counts)
        self._samples = {"every": samples_every, "kept": samples_kept}
        for own, part in parts.items():
            _remark_on_warmup(own, getattr(part, "optimizer", None))
        if censuses:
            tell(f"rows: {'; '.join(census.line() for census in censuses)}")

    @classmethod
    def of(
        cls,
        options: RunOptions,
        fingerprints: Mapping[str, str],
        *,
        census: Census,
        threads: int | None = None,
        observers: Sequence[Observer] = (),
        samples_every: int = 10,
        samples_kept: int = 4,
    ) -> Self:
        """The run of a recipe: its ``options`` and the ``fingerprints`` of its inputs are what a resume compares.

        A folder that is not free and a resume with other options are refused before a model is made: each call of
        ``steps`` names its state. ``threads``: CPU threads that the user has chosen for a worker.

        Raises:
            ValueError: as for ``Run``, or options that none of the observers reads.
            DryRun: the options say that the run ends here.
        """
        run = cls.__new__(cls)
        run._begin(options, fingerprints, observers, parts={}, counts=census.summary, threads=threads)
        run._samples = {"every": samples_every, "kept": samples_kept}
        return run

    def _begin(
        self,
        options: RunOptions,
        fingerprints: Mapping[str, str],
        observers: Sequence[Observer],
        *,
        parts: dict[str, Part],
        counts: Callable[[], Mapping[str, Any]],
        threads: int | None = None,
    ) -> None:
        for observer in observers:
            if isinstance(observer, type) or not hasattr(observer, "started"):
                raise TypeError(f"observers is a list of objects of subclasses of Observer, got {observer!r} in it")
        self._parts, self._named = parts, bool(parts)
        self._run: run.Run = open_run(options, fingerprints, current_executor(), observers)
        self._counts, self._threads = counts, threads
        self._samples = dict[str, int]()
        self._step: int | None = None
        self._stages: list[str] = []
        self._entered = self._left = False
        self._compared: set[str] = set()
        self._noted = dict[str, list[dict[str, Any]]]()
        """Frozen models and evaluations of the sessions before, by stage and kind."""
        self._best_by: str | None = None
        """The metric that ``keep_best`` goes by."""
        self._numbers = dict[str, None]()
        """Names of all numbers that were logged in this session."""
        self._done, self._result = dict[str, int](), dict[str, Any]()
        """Steps of each stage that have their record."""
        self.summary: dict[str, Any] = {}
        """The content of ``summary.json``, once the run has ended."""

    def __enter__(self) -> Self:
        if self._left:
            raise RuntimeError(f"the block of this run has ended: Run({self.folder.name!r}, …, resume=True) goes on")
        with ExitStack() as entered:
            entered.push(self._run.__enter__().__exit__)
            keep_threads(self._run, current_executor(), self._threads)
            entered.pop_all()
        self._entered = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._entered, self._left = False, True
        self._run.keep_remarks(remarks())
        if error is not None:
            self._run.__exit__(kind, error, trace)
            return
        with ExitStack() as closing:
            closing.push(self._run.__exit__)  # the summary comes before the folder is given up
            steps = f"{sum(self._done.values())} steps"
            self.summary = {"result": steps, **self._result, **self._counts(), "seconds": round(self._run.seconds, 1)}
            self._run.finish(self.summary)

    @property
    def folder(self) -> Path:
        """Where the run lies."""
        return self._run.folder

    def steps(self, total: int, state: Sequence[Part] | None = None) -> Iterator[int]:
        """The steps 0 … total − 1 that are still to be done. A step that logs nothing is logged all the same.

        A run may have several stages, as a warm start and reinforcement learning: ``state`` are then the objects of the
        run's state that change in this stage, whose name is that of the model among these.

        >>> with Run("both", state=[warm, policy, rows]) as run:  # doctest: +SKIP
        ...     for _ in run.steps(100, [warm, rows]):
        ...         run.log(warm.update(rows.take(256)))
        ...     warm.sync_weights(policy)
        ...     for step in run.steps(200, [policy, rows]):
        ...         ...

        Raises:
            ValueError: no number of steps, an object that is not in the run's state, a second stage of the same name,
                or an object that changes in a step, or between two stages, and is not in the stage's state.
            RuntimeError: the run was not entered, ``with Run(…) as run``, or its block has ended.
        """
        try:
            count = operator.index(total)
        except TypeError:
            count = -1
        if count < 0:
            raise ValueError(f"run.steps takes the number of steps, whole and not negative, got {total!r}")
        if state is not None:
            require_kind("state", state, Sequence, _LIST)
        if not self._entered:
            raise RuntimeError(
                "the steps of a run are taken in its block: with Run(…) as run: for step in run.steps(…)"
            )
        if not self._named:
            if not state:
                raise ValueError("each stage of a recipe names its state: run.steps(total, [policy, rows])")
            added = [part for part in state if not any(part is other for other in self._parts.values())]
            names = names_of([*self._parts.values(), *added])[len(self._parts) :]
            self._parts |= dict(zip(names, added, strict=True))
        parts = self._parts if state is None else {self._name_of(part): part for part in state}
        stage = next((name for name, part in parts.items() if isinstance(part, Scored)), next(iter(parts)))
        if stage in self._stages:
            raise ValueError(
                f"this run has had its stage {stage!r}: steps(total, state) is called once for each model. Rows of two "
                "kinds for one model are taken in one stage, by the step's number"
            )
        if not self._stages:
            changed.clear()
        else:  # a run that is resumed in this stage syncs the first weights, and takes back what a checkpoint holds
            _require_whole([part for part in changed if isinstance(part, Scored)], list(parts.values()))
        self._stages.append(stage)
        self._compare(f"{stage}, steps", {"steps": total})
        self._run.keep_remarks(remarks())
        holders = _holders(parts)
        policies = [part for part in parts.values() if isinstance(part, Policy)]
        sampling = [policy for policy in policies if policy.kind == stage == "policy"]
        completions = self._completions(sampling[0]) if sampling else None
        with collector_waits():
            for step in self._run.steps(stage, total, state=holders):
                while policies:  # the first step, with the weights of a checkpoint
                    policies.pop().remember()
                changed.clear()
                noted.clear()
                self._step = self._done[stage] = step
                if completions is not None:
                    sampling[0].log_completions(completions, step)
                try:
                    yield step
                except GeneratorExit:
                    changed.clear()  # a step that the loop leaves is of this stage
                    noted.clear()
                    raise
                _require_whole(changed, list(parts.values()))
                self._compare_step(stage)
                if self._step is not None:
                    self.log()
                phase_ended()
        self._done[stage] = self._run.done
        changed.clear()
        noted.clear()

    def log(self, *measured: Mapping[str, float] | Measured) -> None:
        """Write the record of this step: metrics of an update, of groups, or numbers of your own.

        Raises:
            RuntimeError: there is no step, or its record is written: each step has one.
            ValueError: two of these have a number of one name, or a name is the run's own.
            TypeError: what is no number, with its name.
        """
        if self._step is None:
            raise RuntimeError("run.log is called once in each step of run.steps, with all that the step measured")
        metrics: dict[str, float] = {}
        updates = [part for part in measured if isinstance(part, Metrics)]
        for part in measured:
            numbers = numbers_of(part)
            own = {*_OF_RUN, *(_OF_UPDATE if updates else ())}
            if twice := sorted(numbers.keys() & {*metrics, *own}):
                raise ValueError(
                    f"run.log has two numbers named {twice[0]!r}: give one of these another name, as "
                    f"{{f'second/{{name}}': number for name, number in …}}"
                )
            metrics |= {name: number_of(name, number) for name, number in numbers.items()}
        self._numbers |= dict.fromkeys(metrics)
        for place, groups in enumerate(part for part in measured if isinstance(part, Groups)):
            self._compare(f"{self._stages[-1]}, groups {place}", groups.settings())
        last = updates[-1] if updates else None
        batch, tokens = (None, None) if last is None else (last.batch, last.tokens)
        self._run.log(self._step, metrics, tokens=tokens, batch=batch)
        self._done[self._stages[-1]], self._step = self._step + 1, None

    def _compare_step(self, stage: str) -> None:
        """Name a frozen model or an evaluation of this step that no step of the sessions before had.

        Several may take turns. What differed among those of before is a schedule's, and is not named.
        """
        while noted:
            kind, settings = noted.popleft()
            if not self._named:
                continue
            name = f"{stage}, {kind}"
            own = json_of(name, dict(settings()))
            logged = self._run.cached_result(f"noted/{name}", lambda: {"all": []})["all"]
            before = self._noted.setdefault(name, list(logged))
            if own in logged:
                continue
            logged.append(own)
            del logged[:-_NOTED]
            moved = {key for key in own if any(one.get(key) != before[0].get(key) for one in before)}
            if before and name not in self._compared:
                self._compared.add(name)
                self._remark(name, before[-1], own, moved)

    def _compare(self, name: str, settings: Mapping[str, Any]) -> None:
        """Name what a resumed program does otherwise than the session before: settings that stand in no object's state.

        Settings that moved within a session are a schedule's. A recipe's options are compared when its run is opened.
        """
        if not self._named:
            return
        own = json_of(name, dict(settings))
        logged = self._run.cached_result(f"logged/{name}", lambda: {"values": own, "moved": []})
        before, logged["values"] = logged["values"], own
        changed = [key for key in {**before, **own} if before.get(key) != own.get(key)]
        if name in self._compared:
            logged["moved"] = sorted({*logged["moved"], *changed})
            return
        self._compared.add(name)
        self._remark(name, before, own, logged["moved"])

    @staticmethod
    def _remark(name: str, before: Mapping[str, Any], own: Mapping[str, Any], moved: Collection[str]) -> None:
        """Name the settings that are others than ``before``, but those that had ``moved`` before."""
        changed = [key for key in {**before, **own} if before.get(key) != own.get(key) and key not in moved]
        if words := [f"{key} {before.get(key)!r} → {own.get(key)!r}" for key in changed]:
            remark(
                f"the run before had other settings than the program has now ({name}): {'; '.join(words)}; a schedule "
                "of the program's own may be all there is to it"
            )

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """A result in JSON's types that is computed once in a run's life: a resumed run has the first one.

        >>> before = run.once("before", lambda: accuracy(rollout))  # doctest: +SKIP

        Raises:
            TypeError: what JSON cannot hold.
        """
        return self._run.cached_result(f"once/{name}", lambda: json_of(name, compute()))

    def finish(self, result: str, **numbers: Any) -> None:
        """Say what came of the run: ``summary.json`` and ``rl-fn report`` have the line and the numbers.

        Raises:
            ValueError: a name that is the run's own.
            TypeError: what JSON cannot hold, with its name.
        """
        if own := sorted(numbers.keys() & {"census", "seconds", *self._counts()}):
            raise ValueError(f"{own[0]!r} is the run's own in summary.json: give the number another name")
        self._result = {"result": result, **{name: json_of(name, value) for name, value in numbers.items()}}
        if self._named:  # the command says itself what a recipe returns
            self.print(result)

    def _completions(self, policy: Policy) -> CompletionLog:
        """The file of some completions of a stage, with what the loss had of each token."""
        tokenizer = policy.model.tokenizer
        return CompletionLog(self.folder, lambda tokens: str(tokenizer.decode(tokens)), **self._samples)

    def _name_of(self, part: Part) -> str:
        """The name of an object of the state.

        Raises:
            ValueError: the object is not in the state.
        """
        for name, own in self._parts.items():
            if own is part:
                return name
        raise ValueError(f"a {part.kind} changes in these steps that Run(state=[…]) does not name: {list(self._parts)}")

    def print(self, text: str) -> None:
        """Print a line without breaking the progress bar."""
        self._run.print(text)

    def keep_best(self, metric: str, mode: Literal["max", "min"] = "max") -> None:
        """Keep the checkpoint of the step whose record has the best ``metric`` so far, whatever else is removed.

        A later stage whose records have the metric begins anew: its checkpoints hold other models.
        """
        self._run.keep_best(metric, mode)
        self._best_by = metric

    def load_best(self, *models: Part) -> float | None:
        """Give these models the weights of the checkpoint that ``keep_best`` kept; its metric, None if there is none.

        Without one the models stay as they are, and a line says so.

        >>> run.load_best(policy)  # doctest: +SKIP
        >>> policy.save(run.folder / "best")  # doctest: +SKIP

        Raises:
            ValueError: a model that is not in the run's state.
        """
        holders = _holders({self._name_of(model): model for model in models})
        best = self._run.load_best({name: holder for name, holder in holders.items() if isinstance(holder, Engine)})
        if (
            best is None and self._named and self._run.best_lost is None
        ):  # a recipe decides itself whether there is an evaluation
            remark(self._without_best())
        for model in models:
            if isinstance(model, Policy):
                model.remember()
        return best

    def _without_best(self) -> str:
        """Why there is no best checkpoint."""
        start = "run.load_best has changed no weights: "
        if self._best_by is None:
            return f"{start}run.keep_best(metric) comes before the steps"
        if self._best_by in self._numbers:
            return f"{start}run.keep_best({self._best_by!r}) comes before the steps, and a best number is finite"
        return (
            f"{start}no record has {self._best_by!r}, by which run.keep_best goes; what run.log got here is "
            f"{', '.join(self._numbers) or 'nothing'}"
        )


def _holders(parts: Mapping[str, Part]) -> dict[str, Engine | Stateful]:
    """Engines and states of the objects by their names in a checkpoint.

    Raises:
        ValueError: two of one name.
    """
    holders: dict[str, Engine | Stateful] = {}
    for first, part in parts.items():
        for own, holder in part.parts().items():
            name = own if first == part.kind else f"{first}-{own}"
            if name in holders:
                raise ValueError(f"two objects of the state have a part {name!r}: a checkpoint would hold one of them")
            holders[name] = holder
    return holders


def _remark_on_warmup(name: str, optimizer: Any) -> None:
    """Say of an object's optimiser that its updates end before the learning rate is what the loop names."""
    if isinstance(optimizer, AdamW) and 0 < optimizer.updates <= optimizer.warmup:
        highest = optimizer.highest(optimizer.updates)
        if highest < 1:
            tell(
                f"{name}: AdamW(warmup={optimizer.warmup}) is longer than the schedule, total={optimizer.total}: the "
                f"learning rate comes to {highest * optimizer.learning_rate:.3g} within that, and not to "
                f"{optimizer.learning_rate:g}"
            )


_NOTED = 16
"""Frozen models and evaluations of a kind that a checkpoint holds."""
_LIST = "a list of the objects that change from step to step, as [policy, rows]"
_OF_RUN = ("stage", "step", "seconds", "weights_version", "optimizer_step")
"""Numbers of a record that are the run's own."""
_OF_UPDATE = ("tokens_per_second", "trained_tokens")
"""Those of a record with an update."""


def _require_whole(changes: Sequence[Part], state: Sequence[Part]) -> None:
    """Refuse an object that changes and is in no checkpoint of the stage: a resumed run would have the first one.

    Raises:
        ValueError: with the way on.
    """
    saved = [*state, *(part.rows for part in state if isinstance(part, Ahead))]
    if lost := [part.kind for part in changes if not any(part is other for other in saved)]:
        raise ValueError(
            f"a {lost[0]} changes, and no checkpoint of these steps has it: a resumed run would go on with the first "
            f"one. Name the {lost[0]} in Run(state=[…]), and in steps(total, […]) where that names objects, too"
        )
