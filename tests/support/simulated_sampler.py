"""A sampler and an environment's clock without models, threads or sleeps: time is a number."""

import heapq
import random
from typing import Any, NamedTuple

from rl_bridge.environments.environment_calls import Finished


class Drawn(NamedTuple):
    key: Any
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    allowed: tuple[tuple[int, ...], ...] | None
    reason: str
    versions: tuple[int, ...] | None = None


class Row(NamedTuple):
    key: Any
    prompt: tuple[int, ...]
    seed: int
    drawn: int
    limit: int


class SimulatedSampler:
    """Draws each token from the seed, its number and the tokens before it, as a model would; up to ``room`` rows."""

    server = False
    """Whether it is one: a row draws a token more until the server hears that it is withdrawn."""

    def __init__(self, vocabulary, eos, *, room=10**6, stop=0.3, clock=None, truncated=False, stop_texts=()):
        self.vocabulary, self.eos, self.room, self.stop, self.clock = list(vocabulary), eos, room, stop, clock
        self.truncated, self.ends = truncated, [eos, *stop_texts]
        self.queue, self.rows, self.added, self.together = [], [], [], []

    @property
    def running(self):
        return len(self.rows)

    @property
    def waiting(self):
        return len(self.queue)

    def add(self, key, tokens, *, seed, drawn=0, limit, said=0):
        assert limit >= 1 and key not in [row.key for row, _ in self.rows]
        self.added.append(Row(key, tuple(tokens), seed, drawn, limit))
        self.queue.append((self.added[-1], []))

    def step(self):
        while self.queue and len(self.rows) < self.room:
            self.rows.append(self.queue.pop(0))
        self.together.append({row.key for row, _ in self.rows})
        if self.clock is not None:
            self.clock.now += 1
        found, left = [], []
        for row, tokens in self.rows:
            tokens.append(self.draw(row, tokens))
            if self.ended(row, tokens):
                found.append(self.finished(row, tokens))
            else:
                left.append((row, tokens))
        self.rows = left
        return found

    def withdraw(self, keys):
        for row, tokens in self.rows if self.server else ():
            if row.key in keys:
                tokens.append(self.draw(row, tokens))
        out = [(row, tokens) for row, tokens in [*self.rows, *((row, []) for row, _ in self.queue)] if row.key in keys]
        self.rows = [(row, tokens) for row, tokens in self.rows if row.key not in keys]
        self.queue = [(row, tokens) for row, tokens in self.queue if row.key not in keys]
        return [
            self.finished(row, tokens)._replace(**{} if self.ended(row, tokens) else {"reason": "abort"})
            for row, tokens in out
        ]

    def count_tokens(self):
        self.counts = True

    @property
    def unfinished_tokens(self):
        assert self.counts
        return sum(len(tokens) for _, tokens in self.rows)

    def draw(self, row, tokens):
        choice = random.Random(f"{row.seed}/{row.drawn + len(tokens)}/{(*row.prompt, *tokens)}")
        return self.eos if choice.random() < self.stop else choice.choice(self.vocabulary)

    def ended(self, row, tokens):
        return tokens[-1:] in [[end] for end in self.ends] or len(tokens) == row.limit

    def finished(self, row, tokens):
        logprobs = tuple(-0.5 - token / 1000 for token in tokens)
        allowed = tuple((token, token + 1) for token in tokens) if self.truncated else None
        reason = "stop" if tokens and tokens[-1] in self.ends else "length"
        return Drawn(row.key, tuple(tokens), logprobs, allowed, reason)


class SimulatedSteps:
    """Each call takes as long as ``delay(number)`` says, in steps of the sampler."""

    def __init__(self, delay):
        self.delay, self.now, self.calls, self.most = delay, 0.0, [], 0
        self._count = 0

    def start(self, key, work):
        heapq.heappush(self.calls, (self.now + self.delay(self._count), self._count, key, work))
        self._count += 1

    def finished(self, *, wait, seconds=float("inf")):
        if wait and self.calls:
            self.now = max(self.now, min(self.calls[0][0], self.now + seconds))
        found = []
        while self.calls and self.calls[0][0] <= self.now:
            _, _, key, work = heapq.heappop(self.calls)
            try:
                found.append(Finished(key, work(), None))
            except Exception as error:
                found.append(Finished(key, None, error))
        return found
