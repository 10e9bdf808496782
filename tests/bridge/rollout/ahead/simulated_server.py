"""A server as engines see it: it draws between two commands and while it is waited for, ends rows, and answers late.

Above it are the real decoder of servers and the real methods of a worker.
"""

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.rollout.ahead.ledger import Tokens
from rl_bridge.rollout.ahead.pumps import Advance
from rl_bridge.rollout.rollout_worker import Advancing
from rl_bridge.rollout.served.protocol import Completion
from rl_bridge.rollout.served.served_engine import ServedDecoder
from tests.bridge.rollout.ahead.simulated_engine import most_likely, token

SAMPLING = SamplingParams(max_new_tokens=1)


class Asked(NamedTuple):
    """A request: its first token is the prompt's number."""

    tokens: tuple[int, ...]
    seed: int
    drawn: int
    limit: int
    greedy: bool
    had: list[tuple[int, int]]
    """Tokens and the versions that drew them."""


class SimulatedServer:
    """What ``ServedEngine`` is to a decoder. ``random`` is its clock: how much it draws between two calls."""

    def __init__(self, end, truncated, random):
        self.version, self.end, self.truncated, self.random = None, end, truncated, random
        self.running: dict[str, Asked] = {}
        self.done: dict[str, Completion] = {}
        self.names = itertools.count()

    def limits(self):
        return SimpleNamespace(longest=2**40, vocabulary=None)

    def submit(self, tokens, sampling, *, seed, drawn, limit, stop):
        assert limit >= 1, f"a request for {limit} tokens"
        name = str(next(self.names))
        self.running[name] = Asked(tokens, seed, drawn, limit, sampling.temperature == 0, [])
        return name

    def take(self, names, seconds):
        self.draw(self.random.choice([1, 1, 2, 20]))
        # What has ended is not told at once.
        told = [name for name in names if name in self.done and self.random.random() < 0.7]
        return {name: self.done.pop(name) for name in told}

    def withdraw(self, names):
        self.draw(self.random.choice([0, 1, 5]))
        for name in set(names) & self.running.keys():
            self.leave(name, "abort")
        return {name: self.done.pop(name) for name in names}

    def forget(self, names):
        for name in names:
            self.running.pop(name, None), self.done.pop(name, None)

    def draw(self, tokens):
        """So many tokens of each request, or fewer: some are scheduled more often."""
        for name, asked in list(self.running.items()):
            for _ in range(self.random.randint(0, tokens)):
                if name in self.running:
                    self.draw_one(name, asked)

    def draw_one(self, name, asked):
        assert self.version is not None, "requests in a server without weights"
        number, prompt = asked.drawn + len(asked.had), asked.tokens[0]
        asked.had.append(
            (most_likely(prompt, number) if asked.greedy else token(prompt, asked.seed, number), self.version)
        )
        if self.end(asked.seed, number + 1):
            self.leave(name, "stop")
        elif len(asked.had) == asked.limit:
            self.leave(name, "length")

    def leave(self, name, reason):
        had = self.running.pop(name).had
        tokens, versions = [token for token, _ in had], [version for _, version in had]
        allowed: Any = [(token, token + 1) for token in tokens] if self.truncated else None
        self.done[name] = Completion(tokens, [-float(version) for version in versions], allowed, versions, reason)


class ServedSimulation(Advancing):
    """``SimulatedEngine`` of a server: the rows, and what the pump's commands make of them."""

    _stop = ()

    def __init__(self, end, truncated, random):
        self.server, self._rows = SimulatedServer(end, truncated, random), set()

    def decoder(self, sampling):
        return ServedDecoder(self.server, sampling, stop=())

    def weights_version(self):
        return self.server.version

    @property
    def version(self):
        return self.server.version

    @version.setter
    def version(self, version):
        assert not self.server.running, "the weights change under requests"
        self.server.version = version

    @property
    def rows(self):
        """Rows that went in and have not come back."""
        return self._rows

    def run(self, command):
        # Time has passed since the last command, for instance a training step.
        self.server.draw(self.server.random.choice([0, 0, 3, 50]))
        if isinstance(command, Advance):
            rows = [row._replace(prompt=(row.prompt,)) for row in command.rows]
            assert not self._rows & {row.key for row in rows}, "a row goes in twice"
            self._rows |= {row.key for row in rows}
            ended = self.advance(rows, SAMPLING, command.steps, command.exactly)
        else:
            ended = self.withdraw(command.keys)
        self._rows -= {row.key for row in ended}
        # A list travels where a server's words come in others.
        return [row._replace(drawn=Tokens(*(list(part) if part else part for part in row.drawn))) for row in ended]
