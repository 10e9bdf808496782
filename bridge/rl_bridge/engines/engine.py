"""The base of all engines: a factory, slots, calls to workers, moves between devices, new workers for dead ones."""

import difflib
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import torch

from rl_bridge.common.random_numbers import generators
from rl_bridge.common.user_files import required_arguments
from rl_bridge.engines.dispatch import Itself, Join, Split, in_order, split
from rl_bridge.engines.worker import (
    Description,
    build_worker,
    call_worker,
    device_of_worker,
    forget_worker,
    move_worker,
)
from rl_bridge.executors import Executor
from rl_bridge.executors.executor import Together, WorkerDied
from rl_bridge.executors.host import Host
from rl_bridge.executors.placement import place
from rl_bridge.executors.session import current_executor
from rl_bridge.parallel.mesh import Mesh

# One engine: its slots, calls that go to every worker, and moves between devices.

What = Literal["weights", "optimizer", "kv_cache"]
GONE = "it was not built, or gave its memory back, by release() or at the end of its with block: make a new one then"
_numbers = itertools.count(1)


class Engine:
    """Workers that a factory makes, called like the one object the factory would make here.

    A public method of the worker's class is a method of the engine: ``engine.method(NeedParallel(rows), ...)``. In how
    many processes the workers live does not show.
    """

    movable: ClassVar[tuple[What, ...]] = ()
    torch_module: ClassVar[bool] = False
    """Whether the factory makes a torch module, with its lifecycle."""
    before_call: Callable[..., None] | None = None
    """Called with the engines that are about to work: ``Turns`` brings them to their devices."""
    wraps: ClassVar[frozenset[str]] = frozenset()
    """Methods of the workers that the engine's own of the same name call."""

    def __init__(
        self,
        factory: Callable[[], Any],
        *,
        executor: Executor | None = None,
        name: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """``factory`` takes no arguments and is called in every worker.

        ``executor``: by default the one of ``rl_bridge.init``. ``name`` is for messages and checkpoints. ``timeout``:
        seconds that a call may take, the executor's own by default.

        Raises:
            TypeError: ``factory`` is an object rather than something that makes one.
        """
        if isinstance(factory, torch.nn.Module) or not callable(factory) or _parameters(factory):
            raise TypeError(
                f"{type(self).__name__} takes a factory without arguments, got {type(factory).__name__}: "
                "write lambda: YourModule(...)"
            )
        self.name = name or f"{type(self).__name__}-{next(_numbers)}"
        self._factory, self._timeout = factory, timeout
        self._executor = current_executor() if executor is None else executor
        self._slots: list[int] = []
        self._layout = Mesh()
        self._description = Description()
        self._build_arguments: dict[int, tuple[Any, ...]] = {}
        self._together: Together | None = None

    def build(
        self,
        *,
        mesh: Mesh | None = None,
        colocate_with: "Engine | Sequence[Engine]" = (),
        not_colocate_with: "Engine | Sequence[Engine]" = (),
        nodes: Sequence[str] | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> Self:
        """Make the workers, ``mesh.size`` of them.

        ``colocate_with``: take turns with an engine, or with several, in their slots. ``not_colocate_with``: have no
        slot in common, so that both can run at the same time. ``nodes``: addresses of machines. ``resources``: what
        every slot has.

        Raises:
            ValueError: the wishes cannot be met, the engine is built already, the mesh is not one for these workers,
                or a method of theirs has the name of one of the engine's.
        """
        # An executor that was started again holds no engine, and this one may be built again.
        if any(self.name in self._executor.held.get(slot, ()) for slot in self._slots):
            raise ValueError("this engine is built already")
        layout = Mesh() if mesh is None else mesh
        engines_of = self._executor.held
        self.name = _unused(self.name, {name for names in engines_of.values() for name in names})
        slots = place(
            self._executor.slots,
            layout.size,
            occupied=engines_of,
            colocate_with=[engine.slots for engine in _engines(colocate_with)],
            not_colocate_with=[engine.slots for engine in _engines(not_colocate_with)],
            nodes=nodes,
            resources=resources,
        )
        # A module without a checkpoint gets the values that the factory would make here, wherever its workers are.
        # The states are read and not advanced: what comes after a build does not depend on it.
        start = generators()
        arguments = {
            slot: (self.name, self._factory, rank, slots, layout, start, self.torch_module)
            for rank, slot in enumerate(slots)
        }
        self._build_arguments = arguments
        self._together = self._executor.together(slots) if self.torch_module and len(slots) > 1 else None
        try:
            answers = self._executor.call(
                build_worker, arguments, what=f"{self.name}.build", timeout=self._timeout, together=self._together
            )
            self._require_own_names(answers[slots[0]])
        except BaseException:
            self._forget(slots)
            raise
        self._slots, self._layout, self._description = slots, layout, answers[slots[0]]
        for slot in slots:
            engines_of.setdefault(slot, []).append(self.name)
        return self

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of every worker, ``NeedParallel`` arguments cut, results joined as the method declares."""
        return self.submit(method, *args, **kwargs).result()

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """``call`` without waiting: engines that share no slot run at the same time.

        Raises:
            AttributeError: the worker has no such method. Nothing is sent then.
            ValueError: the engine is not built, the arguments cannot be split, or a worker would get no row that does
                not say that it can be called without one. Nothing is sent then.
            OutOfStep: an earlier call failed in some of the workers, and their collectives would not meet any more.
        """
        how = self._require(method)
        parts = split(args, kwargs, self._layout)
        what = f"{self.name}.{method}"
        self._require_rows(parts, what)
        if self.before_call is not None:
            self.before_call(self)
        speakers = self._layout.token_speakers() if parts.over_sequence else self._layout.speakers()
        ranks = range(self.workers) if how == "local" else speakers
        # Ranks with the same rows get one tuple, which the executor encodes once.
        messages = {
            id(part): (self.name, method, *part, None if how == "local" else speakers) for part in parts.arguments
        }
        arguments = {slot: messages[id(parts.arguments[rank])] for rank, slot in enumerate(self._slots)}
        answers = self._executor.submit(
            call_worker, arguments, what=what, timeout=self._timeout, together=self._together
        )
        slots, layout = self._slots, self._layout

        def joined(by_slot: Mapping[int, Any]) -> Any:
            results = [by_slot[slots[rank]] for rank in ranks]
            if all(isinstance(result, Itself) for result in results):
                return self
            return in_order(results, how, parts, layout, what)

        return _then(answers, joined)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Run ``function(host, *args)`` in the slot of every worker; results by rank."""
        if not self._slots:
            raise ValueError(f"call build() of {self.name} before {function.__name__}: {GONE}")
        arguments = dict.fromkeys(self._slots, args)
        what = f"{self.name}: {function.__name__}"
        answers = self._executor.call(
            function, arguments, what=what, timeout=timeout or self._timeout, together=self._together
        )
        return [answers[slot] for slot in self._slots]

    def require_in_step(self, what: str) -> None:
        """Refuse to use workers of which some have failed: a collective of one would pair with another one's.

        Raises:
            OutOfStep: with the first cause, and what to do.
        """
        if self._together is not None:
            self._executor.require_in_step(self._together, f"{self.name}.{what}")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A public name that the engine does not have is a method of the workers."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if self._slots:
            self._require(name)
        return lambda *args, **kwargs: self.call(name, *args, **kwargs)

    @property
    def executor(self) -> Executor:
        """Where the workers live."""
        return self._executor

    @property
    def workers(self) -> int:
        """How many workers this engine has."""
        return self._layout.size

    @property
    def mesh(self) -> Mesh:
        """How the workers are arranged."""
        return self._layout

    @property
    def slots(self) -> list[int]:
        """Slot of each worker, by rank. Empty before ``build``."""
        return list(self._slots)

    @property
    def methods(self) -> dict[str, Join | None]:
        """Public methods of the workers, and how each declares that its results join."""
        if not self._slots:
            raise ValueError(f"call build() of {self.name} first: {GONE}")
        return dict(self._description.methods)

    @property
    def device(self) -> torch.device:
        """Where the weights of the first worker are."""
        return self.run(device_of_worker, self.name)[0]

    def to(self, device: torch.device | str, what: What | None = None) -> Self:
        """Move weights, optimiser state or KV cache to a device; memory is freed. None: all that the workers have.

        Raises:
            ValueError: a device that is not there, or a part that the engine or its workers do not have.
        """
        own_devices = [slot.device for slot in self._executor.slots if slot.index in self._slots]
        if torch.device(device).type == "cuda" and not all(name.startswith("cuda") for name in own_devices):
            raise ValueError("a worker of this engine sees no CUDA or ROCm device; torch.cuda.is_available() is False")
        if what is not None and what not in self.movable:
            raise ValueError(f"{type(self).__name__} has no {what!r} to move; it has {', '.join(self.movable)}")
        for part in self.movable if what is None else (what,):
            self.run(move_worker, self.name, part, str(device), what is not None)
        return self

    def cuda(self, what: What | None = None) -> Self:
        """Move to the CUDA (or ROCm) device of each worker."""
        return self.to("cuda", what)

    def cpu(self, what: What | None = None) -> Self:
        """Move to host memory."""
        return self.to("cpu", what)

    def meta(self) -> Self:
        """Free the weights: shapes stay, values are gone until a sync or a checkpoint brings them back."""
        return self.to("meta", "weights")

    def release(self) -> None:
        """Let go of the workers: their memory is free, and their slots are others' to use. The dead are let go of."""
        slots, self._slots = self._slots, []
        # An executor that was started again or stopped has no worker of this engine any more.
        slots = [slot for slot in slots if self.name in self._executor.held.get(slot, ())]
        for slot in slots:
            self._executor.held[slot].remove(self.name)
        if slots:
            self._forget(slots)

    def _forget(self, slots: Iterable[int]) -> None:
        if self._together is not None:
            self._executor.part(self._together)
        dead = self._executor.dead()
        arguments = {slot: (self.name,) for slot in slots if slot not in dead}
        try:
            if arguments:
                self._executor.call(forget_worker, arguments, what=f"{self.name}.release", timeout=60)
        except WorkerDied:
            # Its memory is free. It may have died before the call, or in it.
            if not set(arguments) & set(self._executor.dead()):
                raise

    def _require_own_names(self, description: Description) -> None:
        shadowed = sorted(
            name for name in description.own - self.wraps if not name.startswith("_") and hasattr(type(self), name)
        )
        if shadowed:
            raise ValueError(
                f"{description.kind} has methods that {type(self).__name__} would hide, because it has its own of the "
                f"same name: {', '.join(shadowed)}. Give them other names"
            )

    def _require_rows(self, parts: Split, what: str) -> None:
        if parts.shares is None or self._description.takes_empty_shares or all(len(share) for share in parts.shares):
            return
        rows, kind = sum(map(len, parts.shares)), self._description.kind
        raise ValueError(
            f"{what}: {rows} rows for {len(parts.shares)} shares ({self._layout}), and {kind} does not say that it can "
            "be called without a row. Send at least one row a share, such as a row that counts nothing; or declare "
            "takes_empty_shares = True in a ParallelModule whose methods then join the collectives of the others"
        )

    def _require(self, method: str) -> Any:
        if not self._slots:
            raise ValueError(f"call build() of {self.name} before {method}(): {GONE}")
        methods = self._description.methods
        if method not in methods:
            near = difflib.get_close_matches(method, methods, n=3)
            hint = f"; there is {', '.join(near)}" if near else ""
            raise AttributeError(f"the worker of {self.name} has no method {method!r}{hint}")
        return methods[method]


def _engines(engines: Engine | Sequence[Engine]) -> Sequence[Engine]:
    return [engines] if isinstance(engines, Engine) else engines


def _unused(name: str, names_in_use: set[str]) -> str:
    """``name``, or the first of ``name-2``, ``name-3``, … that no engine of the executor has."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(candidate for candidate in names if candidate not in names_in_use)


def _parameters(factory: Callable[..., Any]) -> bool:
    """Whether a call needs arguments."""
    try:
        return bool(required_arguments(factory))
    except (TypeError, ValueError):
        return False


def _then(future: Future[Any], change: Callable[[Any], Any]) -> Future[Any]:
    """A future of ``change(result)``."""
    changed: Future[Any] = Future()
    changed.set_running_or_notify_cancel()  # what is on its way cannot be cancelled

    def finish(completed: Future[Any]) -> None:
        try:
            changed.set_result(change(completed.result()))
        except BaseException as error:
            changed.set_exception(error)

    future.add_done_callback(finish)
    return changed


# Engines that share devices and take turns: who does not work waits in host memory.


class Turns:
    """An engine that is called comes to its devices with all that moves, and those that worked before leave theirs.

    The devices then hold one engine at a time, or the two of a weight sync. Each change costs copies over the bus.
    Without an accelerator everything is in host memory already, and nothing moves.

    >>> turns = Turns()  # one for all objects of a loop that share devices
    >>> rollout, reference = Rollout(model, turns=turns), Reference(model, turns=turns)  # doctest: +SKIP
    >>> policy = Policy(model, objective, AdamW(1e-6), turns=turns)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._working: tuple[Engine, ...] = ()

    def add(self, engine: Engine) -> None:
        """Let a built engine take turns with the others; until its first call it waits."""
        if all(slot.device.startswith("cuda") for slot in engine.executor.slots if slot.index in engine.slots):
            engine.cpu()
            engine.before_call = self.take

    def take(self, *engines: Engine) -> None:
        """Bring these engines to their devices, once those that worked before have left."""
        for engine in self._working:
            if engine not in engines and engine.slots:
                engine.cpu()
        for engine in engines:
            if engine not in self._working:
                engine.cuda()
        self._working = engines


# An engine whose workers die and come back: with the current weights, and with what they had been asked.

logger = logging.getLogger(__name__)
DEATHS = 3
"""Deaths of workers in one call, before their end is the run's."""


class Revived(Engine):
    """Workers that hold nothing but weights of others: a dead one is made again where the executor can.

    A trainer's worker cannot come back so: its optimiser's state is gone with it.
    """

    bring_weights: Callable[[], int] | None = None
    """Repeats the last sync to here: the version that it brings. None: there was none."""
    brought: int | None = None
    """The version of that sync."""
    _threads: Mapping[int, int] = MappingProxyType({})
    keeps_requests = False
    """Whether workers hold requests between calls, as where rollouts run ahead: a new one would not have them."""
    revived = 0
    """Workers that were made again."""

    def asked_again(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """``call``, and the same call again after a worker died in it.

        Nothing of the first call was given out, and random numbers depend on a request's id alone: the answers are
        those that the dead worker would have given. Limits of time begin anew.

        Raises:
            WorkerDied: workers died again and again, or cannot be made again; with the reason.
        """
        for deaths in range(DEATHS + 1):
            try:
                return self.call(method, *args, **kwargs)
            except WorkerDied as death:
                if deaths == DEATHS:
                    raise
                logger.warning("%s; it is started again, and asked again", death)
                self._start_again(death)
        raise AssertionError("the loop returns or raises")

    def build(self, **wishes: Any) -> Self:
        """Build as ``Engine.build`` does; notes what a process has that the factory does not make."""
        super().build(**wishes)
        self._threads = dict(zip(self.slots, self.run(_threads_of), strict=True))
        return self

    def require_alive(self) -> None:
        """Make dead workers again; their weights are those of their factory until a sync.

        Raises:
            WorkerDied: that cannot be done: a dead slot held another engine's worker too, or the executor starts none.
        """
        executor = self.executor
        dead = executor.dead()
        slots = [slot for slot in dead if slot in self.slots]
        if not slots:
            return
        if self.keeps_requests:
            raise WorkerDied(
                f"{dead[slots[0]]}\nIt cannot be started again: requests that run ahead of training were in it; a run "
                "goes on with --resume"
            )
        if others := {slot: engines for slot in dead if (engines := executor.held.get(slot)) != [self.name]}:
            raise WorkerDied(
                f"{dead[slots[0]]}\nIt cannot be started again: slots {list(dead)} died, and with them engines that "
                f"cannot come back, {others}. A rollout in slots of its own can (--asynchronous.rollout-workers, "
                "not_colocate_with); a run goes on with --resume"
            )
        try:
            executor.revive()
        except NotImplementedError as error:
            raise WorkerDied(f"{dead[slots[0]]}\nIt cannot be started again: {error}") from error
        executor.call(_set_threads, {slot: (self._threads[slot],) for slot in slots}, what=f"{self.name}.build")
        arguments = {slot: self._build_arguments[slot] for slot in slots}
        executor.call(build_worker, arguments, what=f"{self.name}.build", timeout=self._timeout)
        self.revived += len(slots)

    def _start_again(self, death: WorkerDied) -> None:
        self.require_alive()
        before = self.brought
        try:
            version = None if self.bring_weights is None else self.bring_weights()
        except ValueError as error:
            raise WorkerDied(f"{death}\nIt was started again, and its weights are gone: {error}") from error
        if version != before:
            raise WorkerDied(
                f"{death}\nIt was started again, and its weights are gone: the trainer has version {version}, "
                f"and requests that were begun with version {before} cannot go on with that one"
            )


def _threads_of(host: Host) -> int:
    return torch.get_num_threads()


def _set_threads(host: Host, threads: int) -> None:
    torch.set_num_threads(threads)
