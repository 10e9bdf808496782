"""Generation by any server of OpenAI's protocol: text in, text out, for evaluation, data and judges.

A trainer needs the token ids that were drawn and their log-probabilities. The protocol has neither ids nor the
distribution after truncation, so a rollout of a trainer refuses this endpoint; vLLM's extension ``return_token_ids``
gives ids, and then trajectories can be made of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from rl_bridge.common.argument_kinds import check_options
from rl_bridge.common.http import Askers, Server
from rl_bridge.data.messages import ARGUMENTS, Chat, chat_of
from rl_bridge.data.trajectory import (
    FinishReason,
    Message,
    Prompt,
    Request,
    SamplingParams,
    Trajectory,
    requests_of,
    single_turn,
)
from rl_bridge.models.encoding import messages_of
from rl_bridge.rollout.sampling import pinned, refuse_together, request_seeds, truncation
from rl_bridge.rollout.served.protocol import MalformedReply, field_of

EXTENSIONS = frozenset({"top_k", "min_p", "repetition_penalty"})
"""Parameters of vLLM's and SGLang's servers that are not in OpenAI's protocol."""
BESIDE_SAMPLING = frozenset(
    {
        "user",
        "metadata",
        "priority",
        "request_id",
        "cache_salt",
        "service_tier",
        "chat_template",
        "chat_template_kwargs",
    }
    | {"add_generation_prompt", "continue_final_message", "add_special_tokens"}
)
"""Fields that change no draw of given prompt tokens; replies have these tokens."""
REASONS: Mapping[Any, FinishReason] = {"stop": "stop", "tool_calls": "stop", "length": "length", "abort": "abort"}


class Text(NamedTuple):
    """One completion."""

    content: str
    finish_reason: FinishReason
    messages: tuple[Message, ...]
    """The prompt's, and the completion's."""
    prompt_tokens: tuple[int, ...] | None
    """Token ids of the prompt as the server read it; None where it does not say."""
    tokens: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class OpenAIEndpoint:
    """An endpoint with ``/chat/completions`` or ``/completions``.

    >>> OpenAIEndpoint(url="http://127.0.0.1:8000/v1", model="policy").token_ids
    False
    """

    url: str
    """The address up to ``/v1``."""
    model: str
    api: Literal["chat", "completions"] = "chat"
    """``completions`` takes prompts as text or token ids, ``chat`` as text or messages."""
    token_ids: bool = False
    """Ask for token ids and log-probabilities by vLLM's ``return_token_ids``; a server without them is refused."""
    headers: tuple[tuple[str, str], ...] = ()
    timeout: float = 600.0
    retries: int = 3
    """Tries after the first. A completion whose reply was lost is drawn again; it is returned once."""
    concurrency: int = 16
    extra: tuple[tuple[str, Any], ...] = ()
    """More fields of a request that this server knows."""
    protocol_only: bool = False
    """Send the parameters of OpenAI's protocol alone, for a server that refuses others. Parameters that the protocol
    lacks (top-k, min-p, the repetition penalty) are then as such a server has them."""

    def __post_init__(self) -> None:
        """Refuse log-probabilities of a distribution that is not pinned.

        Raises:
            ValueError: ``token_ids`` with ``protocol_only``.
        """
        check_options(self)
        if self.token_ids and self.protocol_only:
            raise ValueError("token_ids is an extension of vLLM: a server that knows it knows top_k and min_p too")

    def complete(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[list[Text]]:
        """``sampling.n`` completions of each prompt.

        Every parameter of sampling is sent, neutral where it is not asked for: a server takes missing ones from its
        model's folder. ``top_k``, ``min_p`` and ``repetition_penalty`` are no part of the protocol; they are sent
        as vLLM and SGLang call them (``protocol_only``).

        Raises:
            NoReply: naming the endpoint and the request.
            ValueError: prompts that this API does not take, or truncations whose order on this server is not known.
            MalformedReply: a reply that lacks a field.
        """
        if not prompts:
            return []
        self._require_sent(sampling)
        requests = requests_of(prompts, sampling.seed)
        seeds = request_seeds([request.id for request in requests], sampling.n).tolist()
        calls = [
            partial(self._ask, request, sampling, seed, number)
            for request, row in zip(requests, seeds, strict=True)
            for number, seed in enumerate(row)
        ]
        with Askers(self.concurrency, "endpoint request") as askers:
            texts = [future.result() for future in [askers.submit(call) for call in calls]]
        return [texts[start : start + sampling.n] for start in range(0, len(texts), sampling.n)]

    def trajectories(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[list[Trajectory]]:
        """The completions as trajectories of token ids, as the server drew them; of weights version 0.

        Raises:
            ValueError: ``token_ids`` is off, texts stop a completion, or sampling is truncated or changed by ``extra``:
                the protocol's log-probabilities are those before, of another distribution than was sampled from.
        """
        if not self.token_ids:
            raise ValueError(
                f"{self.url} returns text, and text encoded again may be other tokens than were drawn: set token_ids "
                "(vLLM's return_token_ids), or take vLLM's or SGLang's own API (docs: rollouts.md)"
            )
        if changing := sorted({name for name, _ in self.extra} - BESIDE_SAMPLING):
            raise ValueError(
                f"extra has {', '.join(changing)}, which may change what is sampled; log-probabilities are those before"
            )
        if sampling.temperature != 1 or truncation(sampling):
            raise ValueError(
                "OpenAI's protocol has no log-probabilities of the distribution that was sampled from, but at "
                f"temperature 1 without truncation; got {sampling}"
            )
        if sampling.stop:
            raise ValueError(f"a server that cuts a completion at a text says not which tokens were drawn: {sampling}")
        completions = self.complete(prompts, sampling)
        requests = requests_of(prompts, sampling.seed)
        return [
            [_trajectory(text, request, number) for number, text in enumerate(texts)]
            for request, texts in zip(requests, completions, strict=True)
        ]

    def _ask(self, request: Request, sampling: SamplingParams, seed: int, number: int) -> Text:
        what = f"request {'-'.join(map(str, (*request.id, number)))}"
        server = Server(url=self.url.rstrip("/"), headers=self.headers, timeout=self.timeout, retries=self.retries)
        path = "/chat/completions" if self.api == "chat" else "/completions"
        chat = chat_of(request.prompt)
        reply = server.post(self._request(chat, sampling, seed), path=path, what=what)
        choices = field_of(reply, "choices")
        if not choices:
            raise MalformedReply(f"{self.url}{path} ({what}) replied without a choice: {reply}")
        choice = choices[0]
        message = field_of(choice, "message") if self.api == "chat" else {"content": field_of(choice, "text")}
        content = field_of(message, "content")
        # A server that reads calls takes them out of the text.
        calls = {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
        ended = field_of(choice, "finish_reason")
        text = Text(
            content or "",
            REASONS.get(ended, "error"),
            (*messages_of(chat), {"role": "assistant", "content": content or "", **calls}),
            None,
            None,
            None,
        )
        return self._with_tokens(text, reply, choice, f"{self.url}{path} ({what})") if self.token_ids else text

    def _knows(self, name: str) -> bool:
        return not self.protocol_only or name not in EXTENSIONS

    def _require_sent(self, sampling: SamplingParams) -> None:
        refuse_together(sampling, [("top_k", "top_p"), ("top_p", "min_p")], self.url)
        if lost := [name for name in truncation(sampling) if not self._knows(name)]:
            raise ValueError(f"OpenAI's protocol has no {lost[0]}, and protocol_only sends nothing else")

    def _request(self, chat: Chat, sampling: SamplingParams, seed: int) -> dict[str, Any]:
        prompt = chat.prompt
        payload: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sampling.max_new_tokens,
            **{name: value for name, value in pinned(sampling).items() if self._knows(name)},
            "seed": seed & 0x7FFFFFFF,
        }
        if sampling.stop:
            payload["stop"] = list(sampling.stop)
        ids = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], int)
        if self.api == "chat":
            if ids:
                raise ValueError("chat completions take text or messages, not token ids: use api='completions'")
            payload["messages"] = [dict(message) for message in messages_of(prompt)]
            if chat.tools:
                payload["tools"] = list(chat.tools)
            if chat.arguments and self.protocol_only:
                raise ValueError(f"OpenAI's protocol has no {ARGUMENTS}, and protocol_only sends nothing else")
        elif chat.tools or chat.arguments:
            raise ValueError("text completions have no chat template, which reads tools: use api='chat'")
        else:
            if not ids and not isinstance(prompt, str):
                raise ValueError("text completions take text or token ids, not messages: use api='chat'")
            payload["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
        if self.token_ids:
            payload |= {"return_token_ids": True, "logprobs": True if self.api == "chat" else 0}
        payload |= dict(self.extra)
        # A prompt's own arguments of the template come before those of all prompts.
        return payload | ({ARGUMENTS: {**payload.get(ARGUMENTS, {}), **chat.arguments}} if chat.arguments else {})

    def _with_tokens(self, text: Text, reply: Any, choice: Any, where: str) -> Text:
        tokens = choice.get("token_ids")
        # vLLM puts a prompt's ids beside the choices of a chat, and into the choice of a completion.
        prompt = reply.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if not tokens or not prompt:
            raise MalformedReply(
                f"{where} returned no token ids: it does not know return_token_ids (vLLM's extension), and text alone "
                "cannot be trained on"
            )
        logprobs = choice.get("logprobs") or {}
        if self.api == "chat":
            values = [row["logprob"] for row in logprobs.get("content") or ()]
        else:
            values = list(logprobs.get("token_logprobs") or ())
        if len(values) != len(tokens) or any(value is None for value in values):
            raise MalformedReply(f"{where} returned {len(values)} log-probabilities for {len(tokens)} tokens")
        return text._replace(prompt_tokens=tuple(prompt), tokens=tuple(tokens), logprobs=tuple(values))


def _trajectory(text: Text, request: Request, number: int) -> Trajectory:
    assert text.prompt_tokens is not None and text.tokens is not None
    return single_turn(
        text.prompt_tokens,
        text.tokens,
        logprobs=text.logprobs,
        finish_reason=text.finish_reason,
        request_id=(*request.id, number),
        group=request.group,
        messages=text.messages,
    )
