"""An engine behind HTTP that can be updated, replaced and restarted; no request is lost or answered twice."""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from rl_bridge.data.requests import SamplingParams
from rl_bridge.http import Askers
from rl_bridge.rollout.served.asking import Ask, Completion, EngineServer
from rl_bridge.rollout.served.process import ServerDied
from rl_bridge.rollout.vllm import probe
from rl_bridge.rollout.vllm.held import Held

logger = logging.getLogger(__name__)
ABORTED = Completion([], [], None, [], "abort")


class ServedEngine:
    """Requests in, completions out; and ``EngineClient``, what an update asks of an engine.

    Each request is one entry of ``_running`` from ``submit`` until its completion is there. A server that dies takes
    no entry with it: the next server gets all of them again, and what a former one still replies is nobody's.
    """

    def __init__(
        self, open_server: Callable[[Path], EngineServer], folder: Path, *, at_once: int, restarts: int
    ) -> None:
        """``open_server(folder)`` starts one. ``at_once``: requests that it gets at a time; others wait here."""
        self._open, self._most = open_server, restarts
        self._current: tuple[Path, str, Path | None] = folder, "0", None
        """Proved: the weights' folder, their version, and the adapter's folder."""
        self._pending: tuple[Path, Path | None] | None = None
        self._running: dict[str, tuple[Ask, object]] = {}
        self._futures: dict[str, Future[None]] = {}
        self._done: dict[str, Completion] = {}
        self._unproved: dict[str, Completion] | None = None
        self._names = itertools.count()
        self._news = threading.Condition()
        self._death: ServerDied | None = None
        self._failure: Exception | None = None
        self._askers = Askers(at_once, "engine request")
        self.restarts = 0
        """Times that a dead server was started again."""
        self._in_a_row = 0
        self.server = self._started(*self._current)

    def submit(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        seed: int,
        drawn: int,
        limit: int,
        stop: frozenset[int],
    ) -> str:
        """Put a request in; its name."""
        name = str(next(self._names))
        with self._news:
            self._begin(Ask(name, tuple(tokens), sampling, seed, drawn, limit, stop))
        return name

    def take(self, names: Collection[str], seconds: float) -> dict[str, Completion]:
        """Completions of these requests, each given out once; waits until there is one, or for so many seconds.

        Raises:
            ServerDied: the server died again and again.
            Exception: whatever was wrong with a request.
        """
        deadline = time.monotonic() + seconds
        with self._news:
            while True:
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
                if self._death is not None:
                    self._restart(self._death)
                found = {name: self._done.pop(name) for name in names if name in self._done}
                left = deadline - time.monotonic()
                if found or left <= 0:
                    return found
                self._news.wait(left)

    def withdraw(self, names: Collection[str], seconds: float = 60.0) -> dict[str, Completion]:
        """Take requests out; what they have drawn so far, or all of it.

        Raises:
            TimeoutError: the engine did not let them go.
        """
        deadline, found = time.monotonic() + seconds, {}
        with self._news:
            for name in names:
                if name in self._running and self._futures[name].cancel():
                    self._finish(name, ABORTED)
        while left := set(names) - found.keys():
            found |= self.take(left, 0.0)
            if left := left - found.keys():
                # A request that is on its way to the engine is not there to be aborted yet.
                with contextlib.suppress(ServerDied):  # the next one gets the requests again, and lets them go
                    self.server.abort(left)
                found |= self.take(left, 0.2)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine did not give up requests {sorted(left)} within {seconds:g} s")
        return found

    def forget(self, names: Collection[str]) -> None:
        """Requests that nobody will take."""
        with self._news:
            left = [name for name in names if self._running.pop(name, None) is not None]
            for name in names:
                self._done.pop(name, None)
        if left and not self.server.dead():
            try:
                self.server.abort(left)
            except (ServerDied, RuntimeError, ValueError):
                logger.warning("requests %s of a decoder that is gone could not be aborted", left)

    def close(self) -> None:
        """End the server; requests that have not finished end with it."""
        with self._news:
            self._running.clear()
        self.server.stop()
        self._askers.close()

    # EngineClient.

    def limits(self) -> probe.EngineLimits:
        """As the server told them."""
        return self.server.limits

    def pause(self) -> None:
        """Running requests stay in the engine, without their keys and values."""
        with self._news:
            self._unproved = {}
        self.server.pause(clear=True)

    def is_paused(self) -> bool:
        """As the engine says."""
        return self.server.is_paused()

    def start(self) -> None:
        """In every worker of the engine."""
        self.server.start()

    def update(self, folder: Path, names: Sequence[str]) -> None:
        """A bucket: the engine reads these tensors from the folder."""
        self._pending = folder, None
        self.server.update(folder, names)

    def finish(self, version: str) -> None:
        """In every worker, then for what is drawn from now on."""
        self.server.finish(version)

    def version(self) -> str:
        """What completions are stamped with."""
        return self.server.version()

    def held(self, folder: Path, adapter: Path | None = None) -> Held:
        """In every worker of the engine."""
        return self.server.held(folder, adapter)

    def reset_prefix_cache(self) -> bool:
        """Blocks of running requests too."""
        return self.server.reset_prefix_cache()

    def generate(self, prompt: Sequence[int], *, count: int, seed: int, temperature: float) -> probe.Drawn:
        """Draw a probe's tokens; an engine that is paused is so again afterwards."""
        paused = self.is_paused()
        if paused:
            self.server.resume()
        drawn = self.server.probe(prompt, count=count, seed=seed, temperature=temperature)
        if paused:
            self.server.pause(clear=False)
        return drawn

    def resume(self) -> None:
        """The weights are proved: what was drawn from them is given out."""
        version = self.version()
        with self._news:
            if self._pending is not None:
                weights, adapter = self._pending
                self._current, self._pending = (weights, version, adapter), None
            proved, self._unproved = self._unproved or {}, None
            for name, completion in proved.items():
                self._finish(name, completion)
        self.server.resume()

    def adopt(self, folder: Path, version: str) -> None:
        """In the place of the adapter before. Requests that run go on with it."""
        self._pending = self._current[0], folder
        self.server.adopt(folder)
        self.server.stamp(version)

    def replace(self, folder: Path, version: str, adapter: Path | None = None) -> None:
        """Another server on these weights, paused; what drew from unproved weights is forgotten and begun again."""
        with self._news:
            self._death, self._pending, self._unproved, self._in_a_row = None, None, {}, 0
            self.server.stop()
            self._current = folder, version, adapter
            self.server = self._started(*self._current)
            self.server.pause(clear=True)
            self._begin_again()

    def _started(self, folder: Path, version: str, adapter: Path | None) -> EngineServer:
        server = self._open(folder)
        try:
            if adapter is not None:
                server.adopt(adapter)
            server.stamp(version)
        except BaseException:
            server.stop()
            raise
        return server

    def _restart(self, death: ServerDied) -> None:
        if self._in_a_row >= self._most:
            raise ServerDied(f"died {self._in_a_row + 1} times without a completion in between: {death}") from death
        self._in_a_row += 1
        self.restarts += 1
        version = self._current[1]
        logger.warning("%s\nstarting again with weights version %s, %d requests", death, version, len(self._running))
        self.server.stop()
        self.server, self._death = self._started(*self._current), None
        self._begin_again()

    def _begin_again(self) -> None:
        for ask, _ in list(self._running.values()):
            self._begin(ask)

    def _begin(self, ask: Ask) -> None:
        attempt = object()
        self._running[ask.name] = ask, attempt
        self._futures[ask.name] = self._askers.submit(partial(self._draw, self.server, ask, attempt))

    def _draw(self, server: EngineServer, ask: Ask, attempt: object) -> None:
        """In a thread of its own: one attempt at one request."""
        completion, death, failure = None, None, None
        try:
            completion = server.draw(ask)
        except ServerDied as error:
            death = error
        except Exception as error:
            failure = error
        with self._news:
            if self._running.get(ask.name, (None, None))[1] is not attempt:
                return  # it was begun again, or taken out: this is nobody's
            if completion is not None and self._unproved is not None:
                self._unproved[ask.name] = completion
            elif completion is not None:
                self._finish(ask.name, completion)
                self._in_a_row = 0
            elif death is not None:
                self._death = death
            else:
                self._running.pop(ask.name)
                self._failure = failure
            self._news.notify_all()

    def _finish(self, name: str, completion: Completion) -> None:
        if self._running.pop(name, None) is not None:
            self._futures.pop(name, None)
            self._done[name] = completion
