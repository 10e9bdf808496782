"""A server of SGLang that somebody else has started, by the HTTP API of SGLang 0.5.23.

Requests and replies follow its published types. No SGLang was run with this file: a recorded server stands for it.
"""

import contextlib
import threading
import time
import uuid
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_bridge.common.http import NoReply, Server
from rl_bridge.common.splitmix64 import logical_shift, mix, signed
from rl_bridge.common.terminal import given
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.rollout.inside_vllm.held_weights import Held
from rl_bridge.rollout.sampling import pinned, refuse_together, truncation
from rl_bridge.rollout.served.process import ServerDied
from rl_bridge.rollout.served.protocol import (
    Ask,
    Completion,
    MalformedReply,
    ServerLimits,
    field_of,
    vocabulary_of,
)
from rl_bridge.rollout.vllm import weight_probe as probe


@dataclass(frozen=True, kw_only=True)
class SGLangOptions(ServerLimits):
    """Where the server is. It must see the folders that weights are copied to (``/dev/shm`` on the same node)."""

    url: str
    max_model_len: int
    """Tokens of the longest sequence that the server was started for (``--context-length``)."""
    page_size: int = 1
    """Tokens that its prefix cache holds together (``--page-size``)."""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers of every request: an API key, for instance."""

    def __post_init__(self) -> None:
        """Refuse a server without an address, room for a token, or limits."""
        super().__post_init__()
        if not self.url.startswith(("http://", "https://")) or self.max_model_len < 1 or self.page_size < 1:
            raise ValueError(
                "need a url that begins with http:// or https://, max_model_len ≥ 1 and page_size ≥ 1, got "
                f"{given(self, 'url', 'max_model_len', 'page_size')}"
            )


class SGLangServer:
    """A connection. It cannot start the server: ``open`` waits for the server, and gives it the weights of a folder."""

    def __init__(self, options: SGLangOptions, folder: Path) -> None:
        """Wait until the server replies, then let it load ``folder``.

        Raises:
            TimeoutError: it did not reply in time.
            RuntimeError: it could not load the folder.
        """
        self.options = options
        server = {"url": options.url.rstrip("/"), "headers": options.headers, "retries": 0}
        self._requests = Server(**server, timeout=options.request_seconds)
        self._control = Server(**server, timeout=options.control_seconds)
        self._asked = Server(**server, timeout=5.0)
        self.limits = probe.EngineLimits(vocabulary_of(folder), options.max_model_len, options.page_size)
        self._paused, self._loaded = False, None
        # Other connections to the server number their requests from 0, too, and one that was lost may still have some.
        self._connection = uuid.uuid4().hex
        self._news = threading.Condition()
        self._drawing: set[str] = set()
        """Requests that the server has."""
        self._aside: set[str] = set()
        """Those of them that it is to give back for a pause, and that are sent again after it."""
        self._waits, self._closed = False, False
        deadline = time.monotonic() + options.start_seconds
        while self.dead():
            if time.monotonic() > deadline:
                raise TimeoutError(f"SGLang's server at {options.url} did not reply for {options.start_seconds:g} s")
            threading.Event().wait(0.5)
        self.start()
        self.update(folder, ())
        self._done("end_weight_update", {})
        self.resume()

    def draw(self, ask: Ask) -> Completion:
        """The completion of one request.

        Behind a pause that took the request out of the server it begins anew.

        Raises:
            ServerDied: the server does not reply any more, or the connection was closed.
            ValueError: the server refuses the request.
        """
        what, name = f"request {ask.name}", ask.name
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closed or not self._waits)
                if self._closed:
                    raise ServerDied("the connection was closed")
                self._drawing.add(name)
            try:
                completion = completion_of(self._asked_for(ask, what), ask, what)
            finally:
                with self._news:
                    begins_again = name in self._aside
                    self._drawing.discard(name)
                    self._aside.discard(name)
                    self._news.notify_all()
            if completion.reason != "abort" or not begins_again:
                return completion

    def probe(self, prompt: Sequence[int], *, count: int, seed: int, temperature: float) -> probe.Drawn:
        """Draw exactly ``count`` tokens."""
        sampling = SamplingParams(max_new_tokens=count, temperature=temperature)
        ask = Ask("rl_fn-probe", tuple(prompt), sampling, seed, 0, count, frozenset())
        reply = self._asked_for(ask, "the probe of an update")
        completion = completion_of(reply, ask, "the probe of an update")
        meta = field_of(reply, "meta_info")
        versions = {str(span["version"]) for span in field_of(meta, "weight_versions")}
        cached = int(field_of(meta, "cached_tokens"))
        version = versions.pop() if len(versions) == 1 else None
        return probe.Drawn(tuple(prompt), tuple(completion.tokens), tuple(completion.logprobs), cached, version)

    def abort(self, names: Collection[str]) -> None:
        """Let these requests reply with what they have, as ``abort``."""
        for name in names:
            self._command("abort_request", {"rid": self._rid(name)})

    def _rid(self, name: str) -> str:
        # SGLang aborts all requests whose id begins so: without its end, 1 would be 10, too.
        return f"{self._connection}-{name}."

    def pause(self, *, clear: bool) -> None:
        """Pause the server. With ``clear`` it gives back its requests, which begin anew with ``resume``.

        SGLang's scheduler ends where an update flushes the cache while a request waits.

        Raises:
            TimeoutError: it did not give them back.
        """
        if clear:
            self._take_out()
        self._command("pause_generation", {"mode": "retract" if clear else "in_place"})
        self._paused = True

    def _take_out(self) -> None:
        deadline = time.monotonic() + self.options.control_seconds
        with self._news:
            self._waits = True
            self._aside |= self._drawing
        if self._paused and self._drawing:  # paused in place, the server ends no request
            self._command("continue_generation", {"torch_empty_cache": False})
            self._paused = False
        while left := sorted(self._drawing):
            self.abort(left)  # again and again: a request that is on its way cannot be aborted yet
            with self._news:
                self._news.wait_for(lambda: not self._drawing, 0.2)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"SGLang did not give back requests {left} within {self.options.control_seconds:g} s"
                )

    def is_paused(self) -> bool:
        """Whether this connection paused the server: SGLang has no question for that."""
        return self._paused

    def resume(self) -> None:
        """Let requests draw again."""
        self._command("continue_generation", {"torch_empty_cache": False})
        self._paused = False
        with self._news:
            self._waits = False
            self._news.notify_all()

    def start(self) -> None:
        """Begin an update; weights that were packed become loadable."""
        self._loaded = None
        self._done("begin_weight_update", {"selector": "all"})

    def update(self, folder: Path, names: Sequence[str]) -> None:
        """Load the folder, whole with its first bucket, and flush the cache."""
        if self._loaded != folder:
            payload = {"model_path": str(folder), "flush_cache": True, "keep_pause": True, "abort_all_requests": False}
            self._done("update_weights_from_disk", payload)
            self._loaded = folder

    def finish(self, version: str) -> None:
        """End the update, and stamp tokens drawn from now on with the version."""
        self._done("end_weight_update", {})
        self.stamp(version)

    def adopt(self, folder: Path) -> None:
        """Adapters are sent merged to here."""
        raise NotImplementedError("a server of SGLang takes adapters merged into the weights")

    def stamp(self, version: str) -> None:
        """Stamp completions of the weights that are there with this version."""
        self._done("update_weight_version", {"new_version": version, "abort_all_requests": False})

    def version(self) -> str:
        """The version that completions are stamped with."""
        try:
            return str(field_of(self._control.get("/model_info"), "weight_version"))
        except NoReply as error:
            raise self._explained(error) from error

    def held(self, folder: Path, adapter: Path | None) -> Held:
        """No comparison: SGLang does not show its tensors."""
        return Held(0, {}, {"all weights": "SGLang does not show what it holds"})

    def reset_prefix_cache(self) -> bool:
        """Whether the update that was last flushed the cache; SGLang refuses a flush while requests wait."""
        return self._loaded is not None

    def dead(self) -> bool:
        """Whether the server does not reply. ``/health`` would draw a token, which a paused server does not."""
        try:
            self._asked.get("/model_info")
        except NoReply:
            return True
        return False

    def stop(self) -> None:
        """Somebody else's server goes on, without the requests of this connection."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        with contextlib.suppress(ServerDied, RuntimeError, ValueError, TimeoutError):
            self._take_out()

    def _asked_for(self, ask: Ask, what: str) -> Any:
        payload = request_of(ask._replace(name=self._rid(ask.name)))
        return self._sent(self._requests, "generate", payload, what)

    def _done(self, path: str, payload: Any) -> None:
        """A command whose reply says whether it succeeded."""
        reply = self._command(path, payload)
        if field_of(reply, "success") is not True:
            raise RuntimeError(f"SGLang's {path} failed: {reply.get('message')}")

    def _command(self, path: str, payload: Any) -> Any:
        return self._sent(self._control, path, payload, "")

    def _sent(self, server: Server, path: str, payload: Any, what: str) -> Any:
        try:
            return server.post(payload, path=f"/{path}", what=what, may_be_empty=True)
        except NoReply as error:
            raise self._explained(error) from error

    def _explained(self, error: NoReply) -> Exception:
        if error.status is None or error.status >= 500:
            return ServerDied(str(error)) if self.dead() else RuntimeError(str(error))
        return ValueError(str(error))


def request_of(ask: Ask) -> dict[str, Any]:
    """``GenerateReqInput`` of one request, as JSON."""
    require_one_order(ask.sampling)
    fields: dict[str, Any] = {
        "max_new_tokens": ask.limit,
        **pinned(ask.sampling),
        "stop_token_ids": sorted(ask.stop),
        "ignore_eos": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        # The server reads the seed with --enable-deterministic-inference.
        "sampling_seed": engine_seed(ask.seed, ask.drawn),
    }
    payload: dict[str, Any] = {
        "rid": ask.name,
        "input_ids": list(ask.tokens),
        "sampling_params": fields,
        "return_logprob": True,
        "stream": False,
    }
    if truncation(ask.sampling):
        payload |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
    return payload


def completion_of(reply: Any, ask: Ask, what: str) -> Completion:
    """The completion in a reply of SGLang, checked.

    Raises:
        MalformedReply: a field is missing, or the tokens, log-probabilities and versions do not fit together.
    """
    tokens, meta = [int(token) for token in field_of(reply, "output_ids")], field_of(reply, "meta_info")
    rows = field_of(meta, "output_token_logprobs")
    if [row[1] for row in rows] != tokens:
        raise MalformedReply(f"{what}: log-probabilities of other tokens than were drawn, {rows[:3]} for {tokens[:3]}")
    versions = [-1] * len(tokens)
    for span in field_of(meta, "weight_versions"):
        versions[span["start"] : span["end"]] = [int(span["version"])] * (span["end"] - span["start"])
    if -1 in versions or len(versions) != len(tokens):
        raise MalformedReply(f"{what}: no weights version for all of {len(tokens)} tokens: {meta['weight_versions']}")
    ended = field_of(field_of(meta, "finish_reason"), "type")
    reason = "abort" if ended == "abort" else "stop" if tokens and tokens[-1] in ask.stop else "length"
    if ended != reason:
        raise MalformedReply(f"{what} ended by {ended!r} after {len(tokens)} tokens, the last {tokens[-1:]}")
    logprobs, allowed = [float(row[0]) for row in rows], None
    if truncation(ask.sampling):
        masks = field_of(meta, "output_token_sampling_mask")
        logprobs = [float(value) for value in field_of(meta, "output_token_sampling_logprobs")]
        if not len(masks) == len(logprobs) == len(tokens):
            raise MalformedReply(f"{what}: {len(masks)} masks and {len(logprobs)} values for {len(tokens)} tokens")
        allowed = [array("i", sorted(ids)) for ids in masks]
    if ask.sampling.temperature == 0:
        logprobs = [0.0] * len(tokens)
    return Completion(tokens, logprobs, allowed, versions, reason)


def engine_seed(seed: int, drawn: int) -> int:
    """The seed that SGLang gets for the draws of a sequence that has ``drawn`` tokens of the policy, in 31 bits.

    SGLang numbers the draws of a request from 0, so that a sequence that goes on needs another seed.
    """
    bits = mix(mix(torch.tensor(signed(seed))) + drawn)
    return int(logical_shift(bits, 1)) & 0x7FFFFFFF


def require_one_order(sampling: SamplingParams) -> None:
    """With FlashInfer and without min-p SGLang takes the mass of top-p before top-k has cut; then after it.

    Raises:
        ValueError: top-k with top-p.
    """
    refuse_together(sampling, [("top_k", "top_p")], "SGLang")
