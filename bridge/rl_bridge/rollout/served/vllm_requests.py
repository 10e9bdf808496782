"""A request in vLLM's words, and vLLM's reply: ``/inference/v1/generate`` of vLLM 0.32."""

from collections.abc import Sequence
from typing import Any

from rl_bridge.rollout.pinned import pinned, truncation
from rl_bridge.rollout.served.asking import Ask, Completion, MalformedReply, field_of
from rl_bridge.rollout.vllm import probe
from rl_bridge.rollout.vllm.draws import EXTRA, DrawsOf


def sampling_fields(ask: Ask) -> dict[str, Any]:
    """vLLM's ``SamplingParams`` of one request, as JSON: what ``vllm_sampling`` is for an engine in this process."""
    cuts = truncation(ask.sampling)
    return {
        **pinned(ask.sampling),
        "min_p": 0.0,  # Draws cuts by min-p, behind top-p
        "max_tokens": ask.limit,
        "stop_token_ids": sorted(ask.stop),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
        "extra_args": {EXTRA: list(DrawsOf(ask.seed, ask.drawn, bool(cuts), cuts.get("min_p", 0.0)))},
    }


def completion_of(reply: Any, ask: Ask, what: str) -> Completion:
    """What vLLM drew, checked.

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
    # Of the greedy choice that distribution has probability 1; vLLM reports the model's own.
    logprobs = [0.0 if greedy else float(row["logprob"]) for row in rows]
    return Completion(tokens, logprobs, None, versions, reason)


def probe_of(reply: Any, prompt: Sequence[int]) -> probe.Drawn:
    """What vLLM drew for an update's probe.

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
