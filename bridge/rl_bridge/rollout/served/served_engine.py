"""An engine behind HTTP and its ``Decoder``: updated, replaced, restarted, and no request is lost or answered twice."""

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from rl_bridge.common.http import Askers
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.rollout.decoder import Decoder, Drawn, check_row
from rl_bridge.rollout.inside_vllm.held_weights import Held
from rl_bridge.rollout.sampling import CompletionText, StopTexts
from rl_bridge.rollout.served.process import ServerDied
from rl_bridge.rollout.served.protocol import Ask, Completion, EngineServer
from rl_bridge.rollout.vllm import weight_probe

logger = logging.getLogger(__name__)
ABORTED = Completion([], [], None, [], "abort")


class ServedEngine:
    """Requests in, completions out; also an ``EngineClient``, with the methods that an update calls.

    Each request is one entry of ``_running`` from ``submit`` until its completion is there. Entries outlive a server
    that dies: the next server gets all of them again, and late replies of a former one are dropped.
    """

    def __init__(
        self, open_server: Callable[[Path], EngineServer], folder: Path, *, at_once: int, restarts: int
    ) -> None:
        """Start a server. ``open_server(folder)`` starts one on the weights in the folder.

        ``at_once``: requests that a server gets at a time; others wait here. ``restarts``: deaths of servers one after
        another, without a completion in between, that are survived.
        """
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
        """Send a request; returns its name."""
        name = str(next(self._names))
        with self._news:
            self._begin(Ask(name, tuple(tokens), sampling, seed, drawn, limit, stop))
        return name

    def take(self, names: Collection[str], seconds: float) -> dict[str, Completion]:
        """Completions of these requests, each given out once; waits until there is one, or for so many seconds.

        Raises:
            ServerDied: the server died again and again.
            Exception: the error of a request.
        """
        deadline = time.monotonic() + seconds
        with self._news:
            while True:
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
                if self._death is not None:
                    self._restart(self._death)
                completions = {name: self._done.pop(name) for name in names if name in self._done}
                left = deadline - time.monotonic()
                if completions or left <= 0:
                    return completions
                self._news.wait(left)

    def withdraw(self, names: Collection[str], seconds: float = 60.0) -> dict[str, Completion]:
        """Take requests out; returns the tokens that they have drawn so far, or all of them.

        Raises:
            TimeoutError: the engine did not let them go.
        """
        deadline, completions = time.monotonic() + seconds, {}
        with self._news:
            for name in names:
                if name in self._running and self._futures[name].cancel():
                    self._finish(name, ABORTED)
        while left := set(names) - completions.keys():
            completions |= self.take(left, 0.0)
            if left := left - completions.keys():
                # A request that is on its way to the engine cannot be aborted there yet.
                with contextlib.suppress(ServerDied):  # the next server gets the requests again, and aborts them
                    self.server.abort(left)
                completions |= self.take(left, 0.2)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine did not give up requests {sorted(left)} within {seconds:g} s")
        return completions

    def forget(self, names: Collection[str]) -> None:
        """Drop requests that nobody will take."""
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

    # The methods of EngineClient.

    def limits(self) -> weight_probe.EngineLimits:
        """The limits that the server gave."""
        return self.server.limits

    def pause(self) -> None:
        """Pause the engine. Running requests stay there, without their keys and values."""
        with self._news:
            lost, self._unproved = self._unproved or {}, {}
        self.server.pause(clear=True)
        with self._news:
            for name in lost.keys() & self._running.keys():
                self._begin(self._running[name][0])  # it ended beside the probe of an update that was never proved

    def is_paused(self) -> bool:
        """Whether the engine says that it is paused."""
        return self.server.is_paused()

    def start(self) -> None:
        """Begin an update in every worker of the engine."""
        self.server.start()

    def update(self, folder: Path, names: Sequence[str]) -> None:
        """Let the engine read a bucket: these tensors of the folder."""
        self._pending = folder, None
        self.server.update(folder, names)

    def finish(self, version: str) -> None:
        """End the update in every worker, then stamp tokens drawn from now on with the version."""
        self.server.finish(version)

    def version(self) -> str:
        """The version that completions are stamped with."""
        return self.server.version()

    def held(self, folder: Path, adapter: Path | None = None) -> Held:
        """Compare the weights in every worker of the engine with those in the folder."""
        return self.server.held(folder, adapter)

    def reset_prefix_cache(self) -> bool:
        """Empty the cache, blocks of running requests included."""
        return self.server.reset_prefix_cache()

    def generate(self, prompt: Sequence[int], *, count: int, seed: int, temperature: float) -> weight_probe.Drawn:
        """Draw a probe's tokens; an engine that is paused is paused again afterwards."""
        paused = self.is_paused()
        if paused:
            self.server.resume()
        try:
            return self.server.probe(prompt, count=count, seed=seed, temperature=temperature)
        finally:
            if paused:
                self.server.pause(clear=False)

    def resume(self) -> None:
        """Go on with proved weights: completions drawn from them are given out."""
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
        """Take the adapter in the place of the one before. Requests that run go on with the new one."""
        self._pending = self._current[0], folder
        self.server.adopt(folder)
        self.server.stamp(version)

    def replace(self, folder: Path, version: str, adapter: Path | None = None) -> None:
        """Start another server on these weights, paused; requests that drew from unproved weights begin again."""
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
        """Make one attempt at a request, in a thread of its own."""
        completion, death, failure = None, None, None
        try:
            completion = server.draw(ask)
        except ServerDied as error:
            death = error
        except Exception as error:
            failure = error
        with self._news:
            if self._running.get(ask.name, (None, None))[1] is not attempt:
                return  # the request was begun again, or taken out: nobody waits for this attempt
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


PIECE = 64
"""Tokens of one request of a row that a text or a budget of tokens may end: tokens behind that end are lost."""


@dataclass
class _Row:
    key: Hashable
    prompt: tuple[int, ...]
    seed: int
    drawn: int
    limit: int
    text: CompletionText | None
    sampling: SamplingParams
    had: list[Completion] = field(default_factory=list)
    """Completions of the requests so far."""

    @property
    def tokens(self) -> list[int]:
        return [token for completion in self.had for token in completion.tokens]


class ServedDecoder(Decoder):
    """Rows in a served engine, each one request or, with stop texts, several. The engine decides which run together."""

    def __init__(
        self,
        engine: ServedEngine,
        sampling: SamplingParams,
        *,
        stop: Collection[int],
        texts: StopTexts | None = None,
        longest: int | None = None,
    ) -> None:
        """``stop``, ``texts``: ids and texts that end a row. ``longest``: tokens of a row, if fewer than the engine's.

        Rows that nobody takes are aborted with this object.
        """
        self._engine, self._sampling, self._stop = engine, sampling, frozenset(stop)
        self._texts, self._longest = texts or None, longest
        self._pieces = self._texts is not None
        self._paused: list[_Row] = []
        self._in_rounds = False
        self._rows: dict[str, _Row] = {}
        weakref.finalize(self, engine.forget, self._rows)

    @property
    def running(self) -> int:
        """Rows that were added and have not been returned."""
        return len(self._rows) + len(self._paused)

    def add(
        self,
        key: Hashable,
        tokens: Sequence[int],
        *,
        seed: int,
        drawn: int = 0,
        limit: int,
        said: int = 0,
        greedy: bool = False,
    ) -> None:
        """Put a sequence in, as ``Decoder.add`` does.

        Raises:
            ValueError: for no tokens, a limit below 1, or a sequence that the engine cannot hold.
        """
        limits = self._engine.limits()
        longest = limits.longest if self._longest is None else min(limits.longest, self._longest)
        check_row(tokens, limit=limit, drawn=drawn, longest=longest, vocabulary=limits.vocabulary)
        text = None if self._texts is None else self._texts.begin(tokens[len(tokens) - said :])
        sampling = self._sampling.greedily() if greedy else self._sampling
        self._go_on(_Row(key, tuple(tokens), seed, drawn, min(limit, longest - len(tokens)), text, sampling))

    def step(self) -> list[Drawn]:
        """The rows that have ended; waits a moment for one."""
        return self._drawn(self._engine.take(self._rows, 0.02))

    def draw_in_rounds(self) -> None:
        """From now on the engine draws in ``round`` alone, so that tokens depend on no time."""
        self._in_rounds = True

    def round(self, tokens: int) -> Sequence[Drawn]:
        """Draw up to ``tokens`` tokens of every row; returns the rows that ended.

        After ``draw_in_rounds`` exactly so many, or up to the row's end, and the engine has no row afterwards.
        """
        if not self._in_rounds:
            return super().round(tokens)
        rows, self._paused = self._paused, []
        for row in rows:
            self._ask(row, tokens)
        ended = []
        while self._rows:
            ended += self._drawn(self._engine.take(self._rows, 0.02))
        return ended

    def count_tokens(self) -> None:
        """Keep ``unfinished_tokens`` up to date from now on, by requests of one piece."""
        self._pieces = True

    @property
    def unfinished_tokens(self) -> int:
        """Tokens of the rows that have not ended, up to their last whole piece."""
        return sum(len(row.tokens) for row in (*self._rows.values(), *self._paused))

    def withdraw(self, keys: Collection[Hashable] | None = None) -> list[Drawn]:
        """Take rows out unfinished, all or those of ``keys``, with the tokens that they have drawn since ``add``."""
        names = [name for name, row in self._rows.items() if keys is None or row.key in keys]
        out = [row for row in self._paused if keys is None or row.key in keys]
        self._paused = [row for row in self._paused if not (keys is None or row.key in keys)]
        drawn = self._drawn(self._engine.withdraw(names), leave=True)
        return drawn + [_whole(row, "abort") for row in out]

    def _go_on(self, row: _Row) -> None:
        if self._in_rounds:
            self._paused.append(row)
        else:
            self._ask(row, PIECE if self._pieces else None)

    def _ask(self, row: _Row, most: int | None) -> None:
        """Send the next request of a row, of at most ``most`` tokens."""
        tokens = row.tokens
        limit = row.limit - len(tokens)
        name = self._engine.submit(
            (*row.prompt, *tokens),
            row.sampling,
            seed=row.seed,
            drawn=row.drawn + len(tokens),
            limit=limit if most is None else min(limit, most),
            stop=self._stop,
        )
        self._rows[name] = row

    def _drawn(self, completions: dict[str, Completion], *, leave: bool = False) -> list[Drawn]:
        """Rows that have ended, or all to ``leave``. A complete text ends a row, with the token that completed it."""
        ended = []
        for name, completion in completions.items():
            row, reason = self._rows.pop(name), completion.reason
            for place, token in enumerate(completion.tokens if row.text is not None else (), 1):
                if row.text is not None and row.text.add(token) is not None:
                    completion, reason = _first(completion, place), "stop"
                    break
            row.had.append(completion)
            if reason == "abort" and not leave and not completion.tokens:
                raise RuntimeError(f"the engine gave up request {name}, which nobody has withdrawn, without a token")
            if reason != "stop" and len(row.tokens) < row.limit:
                if not leave:  # a request that is done, or that somebody else has aborted
                    self._go_on(row)
                    continue
                reason = "abort"
            ended.append(_whole(row, reason))
        return ended


def _whole(row: _Row, reason: Literal["stop", "length", "abort"]) -> Drawn:
    """A row that leaves, with the tokens of all its requests."""
    parts = row.had
    allowed = [ids for part in parts for ids in part.allowed or ()]
    versions = [version for part in parts for version in part.versions or ()]
    logprobs = [value for part in parts for value in part.logprobs]
    unstamped = any(part.tokens and part.versions is None for part in parts)
    return Drawn(row.key, row.tokens, logprobs, allowed or None, reason, None if unstamped else versions)


def _first(completion: Completion, count: int) -> Completion:
    """The first ``count`` tokens of a completion, with all that belongs to them."""
    allowed = None if completion.allowed is None else completion.allowed[:count]
    versions = None if completion.versions is None else completion.versions[:count]
    return Completion(completion.tokens[:count], completion.logprobs[:count], allowed, versions, completion.reason)
