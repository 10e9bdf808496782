"""An engine of vLLM as a server process that this process starts and watches: tokens in, tokens out."""

import json
import os
import sys
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_bridge.common.files import TemporaryFolder
from rl_bridge.common.http import NoReply, Server
from rl_bridge.rollout.inside_vllm.held_weights import Held
from rl_bridge.rollout.inside_vllm.plugin import BACKEND, PROTOCOL, require_in_place
from rl_bridge.rollout.inside_vllm.sampler_hooks import EXTENSION
from rl_bridge.rollout.sampling import truncation
from rl_bridge.rollout.served.process import ServerProcess
from rl_bridge.rollout.served.protocol import (
    Ask,
    Completion,
    MalformedReply,
    ServerLimits,
    field_of,
    vocabulary_of,
)
from rl_bridge.rollout.vllm import weight_probe as probe
from rl_bridge.rollout.vllm.engine_options import VLLMOptions
from rl_bridge.rollout.vllm.lora_adapters import NAME, blank_adapter
from rl_bridge.rollout.vllm.ranks import binding
from rl_bridge.rollout.vllm.request_fields import probe_fields, request_fields
from rl_bridge.rollout.vllm.weight_probe import EngineLimits


def sampling_fields(ask: Ask) -> dict[str, Any]:
    """vLLM's ``SamplingParams`` of one request, as JSON."""
    return request_fields(ask.sampling, seed=ask.seed, drawn=ask.drawn, limit=ask.limit, stop=ask.stop)


def completion_of(reply: Any, ask: Ask, what: str) -> Completion:
    """The completion in a reply of vLLM 0.32's ``/inference/v1/generate``, checked.

    Raises:
        MalformedReply: a field is missing, or the tokens, log-probabilities and versions do not fit together.
    """
    choices = field_of(reply, "choices")
    if len(choices) != 1:
        raise MalformedReply(f"{what} got {len(choices)} choices instead of 1")
    [choice] = choices
    tokens: list[int] = field_of(choice, "token_ids") or []
    content = field_of(choice, "logprobs") or {"content": []}
    rows = field_of(content, "content") or []
    if [row["token_id"] for row in rows] != tokens:
        raise MalformedReply(f"{what}: log-probabilities of other tokens than were drawn, {rows[:3]} for {tokens[:3]}")
    versions = [-1] * len(tokens)
    for span in field_of(choice, "weight_versions") or ():
        versions[span["start"] : span["end"]] = [int(span["version"])] * (span["end"] - span["start"])
    if -1 in versions or len(versions) != len(tokens):
        raise MalformedReply(f"{what}: no weights version for all of {len(tokens)} tokens: {choice}")
    stopped = bool(tokens) and tokens[-1] in ask.stop
    ended = field_of(choice, "finish_reason")
    reason = "abort" if ended == "abort" else "stop" if stopped else "length"
    if reason != "abort" and ended != reason:
        raise MalformedReply(f"{what} ended by {ended!r} after {len(tokens)} tokens, the last {tokens[-1:]}")
    greedy = ask.sampling.temperature == 0
    # The greedy choice has probability 1 in the distribution that is sampled; vLLM reports the model's own.
    logprobs = [0.0 if greedy else float(row["logprob"]) for row in rows]
    return Completion(tokens, logprobs, None, versions, reason)


def probe_of(reply: Any, prompt: Sequence[int]) -> probe.Drawn:
    """The draw of an update's probe in a reply of vLLM, checked.

    Raises:
        MalformedReply: a field is missing, or the parts do not fit together.
    """
    choice = field_of(reply, "choices")[0]
    rows = field_of(field_of(choice, "logprobs"), "content")
    tokens, cached = tuple(field_of(choice, "token_ids")), field_of(reply, "usage").get("prompt_tokens_details")
    if [row["token_id"] for row in rows] != list(tokens):
        raise MalformedReply(f"the probe got log-probabilities of other tokens than were drawn: {choice}")
    versions = {span["version"] for span in choice.get("weight_versions") or ()}
    logprobs = tuple(float(row["logprob"]) for row in rows)
    hits = int((cached or {}).get("cached_tokens") or 0)
    return probe.Drawn(tuple(prompt), tokens, logprobs, hits, versions.pop() if len(versions) == 1 else None)


MAIN = "vllm.entrypoints.launchers.api_server.entry"
"""The module behind ``vllm serve``; the command itself does not find its own version in vLLM's build for CPUs."""
GENERATE = "generate-tokens-"
"""The text that vLLM puts before a request's own name."""
BLANK = "blank"
"""Folder of the adapter that a server begins with, beside its socket."""


@dataclass(frozen=True, kw_only=True)
class ServedOptions(ServerLimits):
    """Options of a server process beside its engine's."""

    restarts: int = 3
    """Times that a dead engine is started again without having completed a request in between."""
    log: str | None = None
    """File for the server's output. None: one in the engine's temporary folder."""

    def __post_init__(self) -> None:
        """Refuse limits that limit nothing."""
        super().__post_init__()
        if self.restarts < 0:
            raise ValueError(f"restarts must be ≥ 0, got {self.restarts}")


class VLLMServer:
    """One server process, from its start to its end. It listens on a socket file of its own, so no port is chosen.

    Whoever can open the file can command the engine: it lies in a folder that only this user can read.
    """

    def __init__(
        self,
        folder: Path,
        options: VLLMOptions,
        served: ServedOptions,
        command: Sequence[str] = (sys.executable, "-m", MAIN),
        own: str | None = None,
    ) -> None:
        """Start the server on the weights of ``folder`` and wait until it replies.

        ``own``: how the engine itself quantises the weights that it is sent.

        Raises:
            ServerDied: the process ended; with the end of its log.
            TimeoutError: it did not reply in time.
            RuntimeError: it does not have this package's plugin or transfer engine.
            ValueError: its attention does not take the model's heads.
        """
        self.options, self.served = options, served
        self._folder = TemporaryFolder("vllm")
        self.home = self._folder.path
        path = self.home / "socket"
        if options.adapter_rank is not None:
            blank_adapter(folder, self.home / BLANK)
        log = Path(served.log) if served.log else self.home / "log"
        server = {"url": "http://vllm", "unix": str(path), "retries": 0}
        self._requests = Server(**server, timeout=served.request_seconds)
        self._control = Server(**server, timeout=served.control_seconds)
        self._asked = Server(**server, timeout=5.0)
        self.process = ServerProcess(
            [*command, *arguments(folder, path, options, served)],
            log,
            env=os.environ
            | ({} if own is None else {"FLASHRL_CONFIG": own})
            | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
            | binding(options.tensor_parallel_size),
            name="vLLM's server",
        )
        try:
            self.process.wait_until(self.healthy, served.start_seconds)
            require_in_place(field_of(self.call("collective_rpc", {"method": "rl_fn_begin"}), "results"), own)
            self.call("init_weight_transfer_engine", {"init_info": {"protocol": PROTOCOL}})
            model = field_of(self.read("v1/models"), "data")[0]
            config = field_of(self.read("server_info?config_format=json"), "vllm_config")
            cache = field_of(config, "cache_config")
            self.limits = EngineLimits(
                vocabulary_of(folder),
                int(field_of(model, "max_model_len")),
                int(field_of(cache, "block_size")) if cache.get("enable_prefix_caching") else 0,
            )
        except BaseException:
            self.stop()
            raise

    def healthy(self) -> bool:
        """Whether the server replies and its engine lives."""
        try:
            self._asked.get("/health")
        except NoReply:
            return False
        return True

    def draw(self, ask: Ask) -> Completion:
        """The completion of one request.

        Raises:
            ServerDied: the engine died before it replied.
            ValueError: the engine refuses the request.
        """
        what = f"request {ask.name}"
        payload = {
            "request_id": ask.name,
            "token_ids": list(ask.tokens),
            **self._model,
            "sampling_params": sampling_fields(ask),
        }
        reply = self._sent(self._requests, "/inference/v1/generate", payload, what)
        completion = completion_of(reply, ask, what)
        if not truncation(ask.sampling):
            return completion
        return completion._replace(allowed=self._allowed(ask.name, len(completion.tokens)))

    def call(self, path: str, payload: Any = None) -> Any:
        """Give a command, once."""
        return self._sent(self._control, f"/{path}", payload, "")

    def read(self, path: str) -> Any:
        """The reply to a question."""
        try:
            return self._control.get(f"/{path}")
        except NoReply as error:
            raise self._explained(error) from error

    def abort(self, names: Collection[str]) -> None:
        """Let these requests reply with what they have, as ``abort``."""
        self.call("abort_requests", {"request_ids": [GENERATE + name for name in names]})

    def pause(self, *, clear: bool) -> None:
        """Running requests stay in the engine; ``clear``: without their keys and values, which are computed again."""
        self.call(f"pause?mode=keep&clear_cache={str(clear).lower()}")

    def is_paused(self) -> bool:
        """Whether the engine says that it is paused."""
        return bool(field_of(self.read("is_paused"), "is_paused"))

    def resume(self) -> None:
        """Let requests draw again."""
        self.call("resume")

    def start(self) -> None:
        """Begin an update in every worker of the engine."""
        self.call("start_weight_update")

    def update(self, folder: Path, names: Sequence[str]) -> None:
        """Let the engine read a bucket: these tensors of the folder."""
        self.call("update_weights", {"update_info": {"folder": str(folder), "names": list(names)}})

    def finish(self, version: str) -> None:
        """End the update in every worker, then stamp tokens drawn from now on with the version."""
        self.call("finish_weight_update", {"weight_version": version})

    def adopt(self, folder: Path) -> None:
        """Draw with the adapter in ``folder`` from now on, in every worker of the engine.

        Raises:
            RuntimeError: the engine has other adapters than this one.
        """
        command = {"method": "rl_fn_adopt", "args": [str(folder)]}
        adapters = field_of(self.call("collective_rpc", command), "results")
        if any(len(numbers) != 1 for numbers in adapters):
            raise RuntimeError(f"the server's workers have adapters {adapters} and not the one that they were given")

    def stamp(self, version: str) -> None:
        """Stamp completions of the weights that are there with this version."""
        self.call("update_weight_version", {"new_version": version})

    def version(self) -> str:
        """The version that completions are stamped with."""
        return str(field_of(self.read("weight_info"), "weight_version"))

    def held(self, folder: Path, adapter: Path | None) -> Held:
        """A comparison in every worker of the engine."""
        command = {"method": "rl_fn_held", "args": [str(folder), None if adapter is None else str(adapter)]}
        return Held.of_ranks(field_of(self.call("collective_rpc", command), "results"))

    def reset_prefix_cache(self) -> bool:
        """Empty the cache, blocks of running requests included."""
        return bool(field_of(self.call("reset_prefix_cache?reset_running_requests=true"), "success"))

    def probe(self, prompt: Sequence[int], *, count: int, seed: int, temperature: float) -> probe.Drawn:
        """Draw exactly ``count`` tokens."""
        fields = probe_fields(max_tokens=count, seed=seed, temperature=temperature)
        payload = {"token_ids": list(prompt), "sampling_params": fields, **self._model}
        return probe_of(self._sent(self._requests, "/inference/v1/generate", payload, "the probe of an update"), prompt)

    def dead(self) -> bool:
        """Whether the process has ended."""
        return self.process.dead.is_set()

    def stop(self) -> None:
        """End the process and remove its folder."""
        self.process.stop()
        self._folder.close()

    @property
    def _model(self) -> dict[str, str]:
        """The field of a request with the name of the adapter that an engine with adapters draws with."""
        return {} if self.options.adapter_rank is None else {"model": NAME}

    def _allowed(self, name: str, count: int) -> list[array] | None:
        """The allowed tokens that the sampler's hook has noted of a request that is done."""
        command = {"method": "rl_fn_allowed", "args": [GENERATE + name, count]}
        rows = field_of(self.call("collective_rpc", command), "results")[0]
        return [array("i", ids) for ids in rows] or None

    def _sent(self, server: Server, path: str, payload: Any, what: str) -> Any:
        try:
            return server.post(payload, path=path, what=what)
        except NoReply as error:
            raise self._explained(error) from error

    def _explained(self, error: NoReply) -> Exception:
        """A dead engine is dead, whatever the reply was; else the reply says what is wrong."""
        if error.status is not None and error.status < 500:
            return ValueError(str(error))
        # A process that is about to end has closed its connections first.
        if self.process.dead.wait(0.5):
            return self.process.death()
        if not self.healthy():
            return self.process.unhealthy(f"has no living engine behind it ({error})")
        return RuntimeError(str(error))


def arguments(folder: Path, socket: Path, options: VLLMOptions, served: ServedOptions) -> list[str]:
    """The arguments that ``vllm`` is called with."""
    flags: dict[str, Any] = {
        "uds": str(socket),
        "served_model_name": "policy",
        "tokens_only": True,
        "enable_prompt_tokens_details": True,
        "disable_uvicorn_access_log": True,
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": EXTENSION,
        # A request that is done must not be drawn for once more: its allowed tokens are read then.
        "async_scheduling": False,
        **options.own_arguments(),
    }
    if options.adapter_rank is not None:
        from rl_bridge.rollout.vllm.vllm_engine import rank_of  # and vLLM with it

        flags |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank_of(options.adapter_rank)}
        flags["lora_modules"] = f"{NAME}={socket.parent / BLANK}"
    words = ["--model", str(folder)]
    # One seat more than there are rows at once: behind all of them the probe of an update would wait for a row's end.
    seats = {"max_num_seqs": options.max_num_seqs + 1}
    for name, value in (flags | options.engine_arguments() | seats).items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(f"--no-{name.replace('_', '-')}")
        elif value is not None:
            words += [flag, value if isinstance(value, str) else json.dumps(value)]
    return words
