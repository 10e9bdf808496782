"""The ``Decoder`` of an engine of vLLM: rows that join and leave, all of them in one engine."""

import itertools
import weakref
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, Literal

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.rollout.decoder import Decoder, Drawn, check_row
from rl_bridge.rollout.inside_vllm.sampler_hooks import Draws
from rl_bridge.rollout.sampling import StopTexts, truncation
from rl_bridge.rollout.vllm.client import InProcessEngine


class Outbox:
    """Hands the finished requests of one engine to the decoders that made them.

    Decoders share the engine: a step of one draws for all. The requests of a decoder that nobody holds any more are
    aborted.
    """

    def __init__(self, engine: InProcessEngine, draws: Draws) -> None:
        self._engine, self.draws = engine, draws
        self._numbers = itertools.count()
        self._owners: dict[str, weakref.ref[VLLMDecoder]] = {}

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows: vLLM itself would embed a row of its padding."""
        return self._engine.limits().vocabulary

    def add(self, owner: "VLLMDecoder", prompt: Sequence[int], params: Any) -> str:
        """Put a request into the engine; returns its name there."""
        name = f"rl_fn-{next(self._numbers)}"
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        self._owners[name] = weakref.ref(owner)
        return name

    def step(self) -> None:
        """Run one step of the engine; each decoder gets its finished requests."""
        if orphans := [name for name, owner in self._owners.items() if owner() is None]:
            self.abort(orphans)
        stopped = []
        for output in self._engine.step():
            name = output.request_id
            owner = self._owners[name]() if name in self._owners else None
            if output.finished and name in self._owners:
                del self._owners[name]
            if owner is not None and output.finished:
                owner.finished(output)
            elif owner is not None and owner.stops(output):
                stopped.append((owner, name))
        for owner, name in stopped:
            for output in self.withdraw([name]):
                owner.finished(output)

    def abort(self, names: Sequence[str]) -> None:
        """Abort these requests without their outputs."""
        self._engine.abort_request(list(names))
        for name in names:
            del self._owners[name]
            self.draws.forget(name)

    def tokens(self, names: Iterable[str]) -> int:
        """Tokens that these requests have drawn, of those that run."""
        engine = self._engine.engine
        running = engine.engine_core.engine_core.scheduler.requests
        inside = engine.output_processor.external_req_ids
        return sum(
            running[internal].num_output_tokens
            for name in names
            for internal in inside.get(name, ())
            if internal in running
        )

    def withdraw(self, names: Sequence[str]) -> list[Any]:
        """Abort these requests; returns vLLM's outputs with their tokens so far.

        Outputs of requests that have ended are not among them: their decoders get these, as from ``step``.
        """
        for output in self._engine.take_ended(names):
            owner = self._owners.pop(output.request_id)()
            if owner is not None:
                owner.finished(output)
        # LLMEngine drops the output of an aborted request, unless the request has a queue, as AsyncLLM's have.
        processor = self._engine.engine.output_processor
        drawn = _Box()
        for name in names:
            for internal in processor.external_req_ids.get(name, ()):
                processor.request_states[internal].queue = drawn
        self._engine.abort_request([name for name in names if name in processor.external_req_ids])
        for output in drawn.outputs:
            del self._owners[output.request_id]
        return drawn.outputs


class _Box:
    """A queue for the outputs of aborted requests."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def put(self, output: Any) -> None:
        self.outputs.append(output)


class VLLMDecoder(Decoder):
    """Rows in an engine of vLLM, which decides itself how many run together."""

    def __init__(
        self,
        outbox: Outbox,
        sampling: SamplingParams,
        *,
        stop: Collection[int],
        texts: StopTexts | None = None,
        longest: int,
    ) -> None:
        """``stop``, ``texts``: ids and texts that end a row. ``longest``: tokens that one sequence can have.

        The engine knows no text: a row whose text is complete is taken out of the engine.
        """
        self._outbox, self._sampling, self._stop, self._longest = outbox, sampling, stop, longest
        self._texts = texts or None
        self._said: dict[str, _Said] = {}
        self._keys: dict[str, tuple[Hashable, SamplingParams]] = {}
        """Name of a request → its row's key, and how it is sampled."""
        self._ended: list[Drawn] = []

    @property
    def running(self) -> int:
        """Rows that were added and have not been returned by ``step``: they run in the engine or wait there."""
        return len(self._keys) + len(self._ended)

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
        check_row(tokens, limit=limit, drawn=drawn, longest=self._longest, vocabulary=self._outbox.vocabulary)
        from rl_bridge.rollout.vllm.vllm_engine import vllm_sampling  # and vLLM with it

        whole = self._texts is None
        sampling = self._sampling.greedily() if greedy else self._sampling
        limit = min(limit, self._longest - len(tokens))  # the model may have fewer positions than the engine holds
        params = vllm_sampling(sampling, seed=seed, drawn=drawn, limit=limit, stop=self._stop, whole=whole)
        name = self._outbox.add(self, tokens, params)
        self._keys[name] = key, sampling
        if self._texts is not None:
            self._said[name] = _Said(self._texts, tokens[len(tokens) - said :])

    def step(self) -> list[Drawn]:
        """Draw a token for the rows that run; returns the rows that ended.

        A row that fills the engine's ``max_model_len`` ends by "length" before its limit.
        """
        if not self._ended and self._keys:
            self._outbox.step()
        ended, self._ended = self._ended, []
        return ended

    @property
    def unfinished_tokens(self) -> int:
        """Tokens of the rows that have not ended."""
        return self._outbox.tokens(self._keys)

    def withdraw(self, keys: Collection[Hashable] | None = None) -> list[Drawn]:
        """Take rows out unfinished, all or those of ``keys``, with the tokens that they have drawn since ``add``."""
        names = [name for name, (key, _) in self._keys.items() if keys is None or key in keys]
        drawn = [self._drawn(output, "abort") for output in self._outbox.withdraw(names)]  # or "stop", by its text
        drawn += [row for row in self._ended if keys is None or row.key in keys]
        self._ended = [row for row in self._ended if not (keys is None or row.key in keys)]
        return drawn

    def finished(self, output: Any) -> None:
        """Take a finished request from the outbox."""
        [completion] = output.outputs
        if self.stops(output):
            self._ended.append(self._drawn(output, "stop"))
            return
        reason = "stop" if completion.token_ids[-1] in self._stop else "length"
        if completion.finish_reason != reason:
            raise RuntimeError(
                f"vLLM ended a sequence by {completion.finish_reason!r} after {len(completion.token_ids)} tokens, the "
                f"last of them {completion.token_ids[-1]}"
            )
        self._ended.append(self._drawn(output, reason))

    def stops(self, output: Any) -> bool:
        """Whether the row's text is complete with the tokens that it has."""
        return self._end(output) is not None

    def _end(self, output: Any) -> int | None:
        """The number of tokens with which the row's text was complete; the engine may have drawn more since then."""
        text = self._said.get(output.request_id)
        return None if text is None else text.end(output.outputs[0].token_ids)

    def _drawn(self, output: Any, reason: Literal["stop", "length", "abort"]) -> Drawn:
        """The row as it leaves, up to the token that completed its text."""
        [completion] = output.outputs
        name, end = output.request_id, self._end(output)
        tokens = list(completion.token_ids)[:end]
        reason = reason if end is None else "stop"
        # The greedy choice has probability 1 in the sampled distribution; vLLM reports the model's probability.
        key, sampling = self._keys.pop(name)
        logprobs = [0.0] * len(tokens) if sampling.temperature == 0 else logprobs_of(completion, tokens)
        allowed = self._outbox.draws.take_allowed(name, len(tokens)) if truncation(sampling) else None
        versions = [int(span.version) for span in completion.weight_versions or () for _ in range(span.start, span.end)]
        self._said.pop(name, None)
        return Drawn(key, tokens, logprobs, allowed or None, reason, versions[:end])


class _Said:
    """The text of one row of the engine, which is searched for stop texts."""

    def __init__(self, texts: StopTexts, said: Sequence[int]) -> None:
        self._texts, self._before = texts, list(said)
        self._again()

    def end(self, tokens: Sequence[int]) -> int | None:
        """The number of the first token with which a stop text is complete, among those that the row has drawn."""
        tokens = list(tokens)
        if tokens[: len(self._seen)] != self._seen:
            self._again()  # the engine was replaced, and draws the row anew
        for token in tokens[len(self._seen) :]:
            self._seen.append(token)
            if self._text.add(token) is not None and self._end is None:
                self._end = len(self._seen)
        return self._end

    def _again(self) -> None:
        self._text, self._end = self._texts.begin(self._before), None
        self._seen: list[int] = []


def logprobs_of(completion: Any, tokens: Sequence[int]) -> list[float]:
    """The log-probability of each of the first ``tokens`` that were drawn."""
    flat = completion.logprobs
    firsts = flat.start_indices[: len(tokens)]
    assert [flat.token_ids[first] for first in firsts] == list(tokens), "vLLM's first entry is the drawn token's"
    return [flat.logprobs[first] for first in firsts]
