"""Calls into slots that are processes of their own: order, deadlines, and an end that leaves no process behind."""

import atexit
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from rl_bridge.executors.calls import Call, Clock, Step, Steps, join, out_of_step
from rl_bridge.executors.executor import Arguments, DeadlineExceeded, Slot, Together, WorkerDied
from rl_bridge.executors.host import Host
from rl_bridge.executors.serving import leave
from rl_bridge.executors.slots import Outgoing

# How long a slot may still be in a call that has failed elsewhere before the next call to the slot is given up. A
# collective that one side has joined cannot be freed.
ABANDONED = 60.0


class Worker(Protocol):
    """A slot as the driver uses it, in a process of its own (``Remote``) or a thread of the driver's (``Own``)."""

    slot: int
    death: WorkerDied | None
    """Why its process is gone, if it is."""

    def encode(self, function: Callable[..., Any], arguments: tuple) -> Any:
        """The message that ``send`` takes. It serves every worker of the same class."""
        ...

    def send(self, call: Call, encoded: Any, step: Step | None = None) -> Outgoing | None:
        """Put a function behind those sent before; its answer goes to ``call``. What there is to wait for, if any."""
        ...

    def unanswered(self) -> list[Call]:
        """Calls sent and not answered, in order."""
        ...

    def where(self, timeout: float) -> str:
        """The stack of the thread that runs the functions."""
        ...

    def ask_to_stop(self) -> None:
        """End after what has been sent."""
        ...

    def ended(self, timeout: float) -> bool:
        """Whether that has happened, after waiting for it."""
        ...

    def close(self) -> None:
        """End now, as far as possible."""
        ...


class RemoteExecutor:
    """The part that torchrun's and Ray's executor share: all but how the processes come to be."""

    name = "remote"

    def __init__(self, slots: Sequence[Slot], workers: Sequence[Worker], *, timeout: float) -> None:
        """``timeout``: seconds a call may take unless it says otherwise."""
        self.slots = tuple(slots)
        self.held: dict[int, list[str]] = {}
        self.timeout = timeout
        self.stopped = False
        self._workers: dict[int, Worker] = {worker.slot: worker for worker in workers}
        self._clock = Clock()
        self._late: list[threading.Thread] = []
        self._steps = Steps()
        self._renewed: set[int] = set()
        # Every slot gets its calls in one order, whichever threads of the driver they come from.
        self._order = threading.Lock()
        self._process = os.getpid()
        self._exiting = False
        atexit.register(self._at_exit)

    def submit(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        *,
        what: str,
        timeout: float | None = None,
        together: Together | None = None,
    ) -> Future[dict[int, Any]]:
        """Run ``function(host, *arguments[slot])`` in every slot named; see ``Executor``.

        Raises:
            ValueError: a slot that does not exist, or the executor has been stopped.
            OutOfStep: an earlier call ``together`` did not end alike in all of its slots.
            WorkerDied: such a call, and one of its processes is gone.
            TypeError: the function or its arguments cannot be sent. Nothing has been, then.
        """
        if self.stopped:
            raise ValueError(f"{what}: this executor has been stopped")
        unknown = sorted(set(arguments) - set(self._workers))
        if unknown or not arguments:
            raise ValueError(f"{what} names slots {unknown or []}; there are slots 0 to {len(self.slots) - 1}")
        if together is not None:
            self.require_in_step(together, what)
        call = Call(what, arguments, self._clock)
        encoded = self._encode(function, arguments, what)
        timeout = self.timeout if timeout is None else timeout
        now = time.monotonic()
        with self._order:
            step = None if together is None else self._steps.begin(together, call)
            frames = [self._workers[slot].send(call, parts, step) for slot, parts in encoded.items()]
        back = [self._clock.at(now + timeout, lambda: self._aside(self._too_late, call, timeout))]
        if any(earlier.over for slot in encoded for earlier in self._before(slot, call)):
            back.append(self._clock.at(now + ABANDONED, lambda: self._aside(self._give_up, call)))
        call.future.add_done_callback(lambda _: [cancel() for cancel in back])
        del encoded
        _settle(call, [frame for frame in frames if frame is not None and not frame.settled.is_set()])
        return call.future

    def call(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        *,
        what: str,
        timeout: float | None = None,
        together: Together | None = None,
    ) -> dict[int, Any]:
        """``submit`` and wait."""
        return self.submit(function, arguments, what=what, timeout=timeout, together=together).result()

    def together(self, slots: Sequence[int]) -> Together:
        """For an engine whose workers are about to be made; groups that are out of step are not given to it."""
        self._renew(Together(tuple(slots), 0))
        return self._steps.together(slots)

    def require_in_step(self, together: Together, what: str) -> None:
        """Refuse a call that could pair its collectives with those of one that failed."""
        for slot in together.slots:
            if (death := self._workers[slot].death) is not None:
                raise WorkerDied(f"{what}: {death}")
        alike, failed = self._steps.failed(together)
        self._tell(Host.forgive, alike)
        self._steps.forget(alike)
        if failed:
            raise out_of_step(what, failed[0])

    def part(self, together: Together) -> None:
        """Let go of process groups that are out of step: who waits in one is free once all engines that have it are."""
        self._renew(together)

    def _renew(self, together: Together) -> None:
        _, failed = self._steps.failed(together)
        renewed = [step for step, _ in failed if step.number not in self._renewed]
        self._renewed.update(step.number for step in renewed)
        self._tell(Host.renew, renewed)

    def _tell(self, what: Callable[..., None], steps: Sequence[Step]) -> None:
        """Send word of failed steps to their slots, and wait for no answer."""
        for step in steps:
            slots = step.together.slots
            call = Call(f"word of {step.what}", slots, self._clock)
            with self._order:
                for slot in slots:
                    worker = self._workers[slot]
                    worker.send(call, worker.encode(what, (step,)))

    def _encode(self, function: Callable[..., Any], arguments: Arguments, what: str) -> Mapping[int, Any]:
        messages: dict[tuple[type, int], Any] = {}
        encoded = {}
        for slot, content in arguments.items():
            worker = self._workers[slot]
            key = type(worker), id(content)
            if key not in messages:
                try:
                    messages[key] = worker.encode(function, content)
                except Exception as error:
                    raise TypeError(f"{what}: what slot {slot} is to get cannot be sent: {error}") from error
            encoded[slot] = messages[key]
        return encoded

    def _before(self, slot: int, call: Call) -> list[Call]:
        """Calls that the slot has to answer before ``call``."""
        unanswered = self._workers[slot].unanswered()
        return unanswered[: unanswered.index(call)] if call in unanswered else []

    def _aside(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run what may wait for answers in a thread of its own: the clock's has other deadlines to keep."""
        thread = threading.Thread(target=function, args=arguments, daemon=True, name="rl_bridge late")
        self._late = [*(late for late in self._late if late.is_alive()), thread]
        thread.start()

    def _too_late(self, call: Call, timeout: float) -> None:
        waiting = call.waiting
        places = "".join(self._places(waiting, call))
        call.abandon(DeadlineExceeded(f"{call.what}: no answer from slots {waiting} in {timeout:g} s{places}"))

    def _places(self, slots: Sequence[int], call: Call) -> list[str]:
        """Where each slot is; all are asked at the same time."""
        places: dict[int, str] = {}

        def ask(slot: int) -> None:
            places[slot] = self._place(slot, call)

        threads = [threading.Thread(target=ask, args=(slot,), daemon=True) for slot in slots]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [places[slot] for slot in slots]

    def _place(self, slot: int, call: Call) -> str:
        before = self._before(slot, call)
        behind = f" ({before[0].what} comes first there)" if before else ""
        return f"\n  slot {slot}{behind} is in\n{self._workers[slot].where(timeout=2.0)}"

    def _give_up(self, call: Call) -> None:
        """End a call that waits in a slot for one that has failed already."""
        for slot in call.waiting:
            stuck = next((earlier for earlier in self._before(slot, call) if earlier.over), None)
            if stuck is not None:
                cause = stuck.future.exception()
                error = DeadlineExceeded(
                    f"{call.what}: slot {slot} is still in {stuck.what}, which has failed, {ABANDONED:g} s later: it "
                    f"waits for a worker that will not come{self._place(slot, call)}\nfirst cause: {cause}"
                )
                error.__cause__ = cause
                call.abandon(error)

    def dead(self) -> dict[int, WorkerDied]:
        """Slots whose process is gone, and why."""
        return {slot: worker.death for slot, worker in sorted(self._workers.items()) if worker.death is not None}

    def _alive(self) -> dict[int, Worker]:
        return {slot: worker for slot, worker in self._workers.items() if worker.death is None}

    def _replace(self, slots: Sequence[Slot], workers: Sequence[Worker]) -> None:
        """Go on with other processes."""
        self.slots = tuple(slots)
        self._workers = {worker.slot: worker for worker in workers}

    def stop(self, patience: float = 10.0) -> None:
        """End the workers' processes: after what they have been sent, but at the latest in ``patience`` seconds."""
        if self.stopped:
            return
        self.stopped = True
        self.held.clear()
        self._end_workers(patience)
        self._clock.stop()
        for thread in self._late:
            join(thread)
        atexit.unregister(self._at_exit)
        if self._stuck():
            atexit.register(leave, 1)
        self._finish()

    def _end_workers(self, patience: float) -> None:
        workers = list(self._workers.values())
        for worker in workers:
            worker.ask_to_stop()
        end = time.monotonic() + patience
        for worker in workers:
            # What is left of a call that has failed will hardly ever end.
            failed = any(call.over for call in worker.unanswered())
            worker.ended(max(0.0, min(end - time.monotonic(), 1.0 if failed else patience)))
        for worker in workers:
            worker.close()

    def _stuck(self) -> bool:
        """Whether a thread of this process is in a collective for good: the interpreter cannot end around it."""
        return False

    def _finish(self) -> None:
        """End what else there is to end."""

    def _at_exit(self) -> None:
        if os.getpid() == self._process:  # and not in a process forked from the driver
            self._exiting = True
            self.stop()
            if self._stuck():
                leave(1)


def _settle(call: Call, frames: Sequence[Outgoing]) -> None:
    """Wait until the arguments of a call may change: they have been sent, or the call is over and they are copied."""
    if not frames:
        return

    def let_go() -> None:
        for frame in frames:
            if not frame.settled.is_set():
                frame.let_go()

    call.future.add_done_callback(lambda _: let_go())
    try:
        for frame in frames:
            frame.settled.wait()
    except BaseException:  # Ctrl-C
        let_go()
        raise
