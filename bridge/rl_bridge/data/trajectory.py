"""Requests to a rollout and their results: what a call may take, ``Trajectory`` with each token's origin."""

import contextlib
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, Self, get_args

from tyro.conf import Fixed, Suppress

from rl_bridge.data.messages import Chat

# Requests to a rollout: prompts with an id each, and how their completions are sampled.

Message = Mapping[str, str]
Prompt = str | Sequence[Message] | Sequence[int] | Chat
"""Text, chat messages (``{"role": ..., "content": ...}``), or token ids that are used as they are; a ``Chat`` is one of
these with tools."""
RequestId = tuple[int, ...]
"""Random numbers are made from it, so no two requests of a run share one."""


TEMPERATURES = (1e-30, 1e30)
"""The least and the largest temperature besides 0."""
_NUMBERS: Mapping[str, type] = {
    **dict.fromkeys(("max_new_tokens", "n", "seed", "top_k"), Integral),
    **dict.fromkeys(("temperature", "top_p", "min_p"), Real),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How completions are sampled.

    A token depends on the request's id, the sample's number and the position alone: not on how the rows were batched
    and not on the worker.
    """

    max_new_tokens: int
    """Tokens of a completion, at most."""
    temperature: float = 1.0
    """Logits are divided by it, in sampling and in a policy's probabilities alike. 0 takes the most likely tokens."""
    top_k: int | None = None
    """Draw among so many tokens, the most likely ones. None: among all."""
    top_p: float | None = None
    """Draw among the fewest tokens whose probabilities add up to this share. None: among all."""
    min_p: float | None = None
    """Draw among the tokens with at least this share of the most likely one's probability. None: among all."""
    n: int = 1
    """Completions of a prompt, the group that an advantage compares a reward with."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the tokenizer's and the model's own stop tokens; all tokens that were drawn
    are kept, the one that completed the text included."""
    # A run has a seed of its own: that of a request is no option of the command line.
    seed: Suppress[Fixed[int]] = 0
    """First number of the ids of requests that are made from bare prompts (``requests_of``)."""

    def __post_init__(self) -> None:
        """Refuse what cannot be sampled, naming the argument.

        Raises:
            TypeError: for what is no number of its kind; True and False are none.
            ValueError: for a number out of range.
        """
        for name, kind in _NUMBERS.items():
            value = getattr(self, name)
            optional = name in ("top_k", "top_p", "min_p")
            if (isinstance(value, bool) or not isinstance(value, kind)) and not (optional and value is None):
                expected = ("a number" if kind is Real else "an integer") + (" or None" if optional else "")
                raise TypeError(f"{name} must be {expected}, got {value!r}")
            # A number of NumPy is none to libraries in C, and may overflow in a comparison.
            with contextlib.suppress(OverflowError):
                object.__setattr__(self, name, value if value is None else float(value) if kind is Real else int(value))
        if self.max_new_tokens < 1 or self.n < 1:
            raise ValueError(f"max_new_tokens and n must be ≥ 1, got {self.max_new_tokens} and {self.n}")
        least, most = TEMPERATURES
        if self.temperature and not least <= self.temperature <= most:
            raise ValueError(
                f"temperature must be 0, for the most likely tokens, or from {least:g} to {most:g}, over which float32 "
                f"holds any logits, got {self.temperature}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be ≥ 1, got {self.top_k}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {value}")
        if isinstance(self.stop, str) or not all(isinstance(text, str) for text in self.stop):
            raise TypeError(f"stop must be a sequence of texts, got {self.stop!r}")
        if not all(self.stop) or any("\N{REPLACEMENT CHARACTER}" in text for text in self.stop):
            raise ValueError(f"a stop text has characters, and no U+FFFD among them, got {self.stop!r}")

    def greedily(self) -> "SamplingParams":
        """The same with the most likely tokens.

        >>> SamplingParams(max_new_tokens=8, temperature=0.7, top_p=0.9).greedily()
        SamplingParams(max_new_tokens=8, temperature=0.0, top_k=None, top_p=None, min_p=None, n=1, stop=(), seed=0)
        """
        return replace(self, temperature=0.0, top_k=None, top_p=None, min_p=None)


class Request(NamedTuple):
    """A prompt; each of its ``SamplingParams.n`` trajectories bears ``group``, and the id with its number added."""

    prompt: Prompt
    id: RequestId
    group: int = 0


class RowRequest(NamedTuple):
    """A row that an environment begins a conversation with; ``id`` and ``group`` as a ``Request`` has them."""

    row: Mapping[str, Any]
    id: RequestId
    group: int = 0


def requests_of(prompts: Sequence[Prompt], seed: int) -> list[Request]:
    """One request a prompt: its id is (seed, place in the call), its group its place.

    >>> requests_of(["1+1=", "2+2="], seed=7)[1]
    Request(prompt='2+2=', id=(7, 1), group=1)
    """
    return [Request(prompt, (seed, place), place) for place, prompt in enumerate(prompts)]


# Limits of one call of a rollout.


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of a call. What is unfinished at a limit ends by "abort", with the tokens that it has."""

    seconds: float | None = None
    """From the call's beginning."""
    request_seconds: float | None = None
    """Limits of one completion or conversation, from its own beginning."""
    tokens: int | None = None
    """That the policy draws in the whole call."""

    def __post_init__(self) -> None:
        """Refuse limits that leave nothing.

        Raises:
            ValueError: naming the limit.
        """
        for name in ("seconds", "request_seconds", "tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0 or None, got {value}")

    def __bool__(self) -> bool:
        """Whether there is a limit."""
        return self != Budget()

    def share(self, workers: int) -> "Budget":
        """That of each of so many workers, whose rows are as many: tokens are cut up, time passes for all.

        >>> Budget(tokens=10).share(4).tokens
        2
        """
        tokens = None if self.tokens is None else max(1, self.tokens // workers)
        return Budget(seconds=self.seconds, request_seconds=self.request_seconds, tokens=tokens)


class Spending:
    """A budget from the moment on that this is made."""

    def __init__(self, budget: Budget, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget, self.clock, self._began = budget, clock, clock()

    def over(self, tokens: int) -> bool:
        """Whether the call's time is over, or the policy has drawn all the tokens that it may."""
        budget = self.budget
        late = budget.seconds is not None and self.clock() - self._began > budget.seconds
        return late or (budget.tokens is not None and tokens >= budget.tokens)

    def late(self, began: float) -> bool:
        """Whether what began then has had its time."""
        limit = self.budget.request_seconds
        return limit is not None and self.clock() - began > limit


# Origins of the tokens of a trajectory: *sampled by request r at offset o*, or *given*.

GIVEN = -1
"""The weights version of a token that nobody drew."""


class Span(NamedTuple):
    """Tokens that one version of the weights drew one behind another. Tokens in no span were given.

    ``drawn`` is what the engine returned, kept beside the trajectory's tokens: so whoever changes one of the two is
    found out.
    """

    request_id: RequestId
    """The trajectory's id as the engine was asked; with ``turn`` it names one request to the engine."""
    turn: int
    offset: int
    """Number of the first token among all that were drawn in this turn."""
    start: int
    """Place of the first token in the trajectory."""
    version: int
    drawn: array
    """Token ids in ``array("i")``, 4 bytes an id."""

    @property
    def stop(self) -> int:
        """Place behind the last token."""
        return self.start + len(self.drawn)

    def where(self, place: int) -> str:
        """The words of a message text for the token at this place of the trajectory."""
        name = "-".join(map(str, self.request_id)) or "without id"
        return f"token {place} (request {name}, turn {self.turn}, offset {self.offset + place - self.start})"


def spans_of_turn(
    request_id: RequestId, turn: int, start: int, drawn: Sequence[int], versions: Sequence[int] | int
) -> tuple[Span, ...]:
    """One span for each run of tokens of one version. ``versions``: of each token, or of all.

    >>> [(s.offset, s.start, s.version, list(s.drawn)) for s in spans_of_turn((7, 0), 0, 5, [3, 4, 2], [1, 1, 2])]
    [(0, 5, 1, [3, 4]), (2, 7, 2, [2])]

    Raises:
        ValueError: not one version a token.
    """
    token_versions = [versions] * len(drawn) if isinstance(versions, int) else list(versions)
    if len(token_versions) != len(drawn):
        raise ValueError(f"request {request_id}, turn {turn}: {len(token_versions)} versions for {len(drawn)} tokens")
    spans, offset = [], 0
    for version, run in groupby(token_versions):
        length = len(list(run))
        tokens = array("i", drawn[offset : offset + length])
        spans.append(Span(request_id, turn, offset, start + offset, version, tokens))
        offset += length
    return tuple(spans)


def require_sampled(
    spans: Sequence[Span], tokens: Sequence[int], mask: Sequence[bool], versions: Sequence[int]
) -> None:
    """Refuse tokens that count in a loss and are not the engine's own.

    A token that the policy drew may be masked out; one that the policy did not draw may not count.

    Raises:
        ValueError: naming the token, the request and what the engine drew.
    """
    behind = 0
    for span in spans:
        if span.start < behind or span.stop > len(tokens):
            raise ValueError(
                f"{span.where(span.start)}: the span of {len(span.drawn)} tokens begins before {behind} or ends "
                f"behind the {len(tokens)} tokens of its trajectory"
            )
        _require_given(mask, behind, span.start)
        if list(tokens[span.start : span.stop]) != span.drawn.tolist():
            place = next(n for n, token in enumerate(span.drawn, span.start) if tokens[n] != token)
            raise ValueError(
                f"{span.where(place)} is {tokens[place]}, and the engine drew {span.drawn[place - span.start]}: a "
                "policy would be trained on tokens that the policy did not draw"
            )
        if set(versions[span.start : span.stop]) - {span.version}:
            place = next(n for n in range(span.start, span.stop) if versions[n] != span.version)
            raise ValueError(
                f"{span.where(place)} has weights version {versions[place]}, and version {span.version} drew it"
            )
        behind = span.stop
    _require_given(mask, behind, len(tokens))


def _require_given(mask: Sequence[bool], start: int, stop: int) -> None:
    if True in mask[start:stop]:
        place = mask.index(True, start, stop)
        raise ValueError(f"token {place} counts in the loss, and no request to the engine drew it")


# ``Trajectory``: a prompt and all turns as the model saw them, with what is known of each token.

FinishReason = Literal["stop", "length", "turns", "abort", "error"]
"""A stop token or text; out of tokens; out of turns; given up by the caller; the environment or engine failed."""
REASONS = get_args(FinishReason)


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """Per-token fields have one entry a token of ``tokens``; token ids are never decoded and encoded again.

    >>> t = single_turn([5, 6], [7, 1], logprobs=[-0.5, -0.1])
    >>> t.tokens, t.loss_mask, t.sampled_tokens
    ((5, 6, 7, 1), (False, False, True, True), (7, 1))
    """

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True on tokens that the policy drew. The first token has nothing before it and is never one."""
    logprobs: tuple[float, ...]
    """Log-probabilities of drawn tokens, under the distribution that they were drawn from; 0 elsewhere."""
    weights_versions: tuple[int, ...]
    """Version of the weights that drew each token; −1 elsewhere."""
    finish_reason: FinishReason
    stop_reason: str | None = None
    """The stop text that ended it (``SamplingParams.stop``). None where a token did, or anything else."""
    allowed_tokens: Sequence[Sequence[int]] | None = None
    """Ids that the truncated sampler allowed for each drawn token, rising; none elsewhere. A rollout gives them in
    ``array("i")``, 4 bytes an id. None where nobody recorded them, or where nothing was truncated."""
    turns: int = 1
    request_id: RequestId = ()
    group: int = 0
    """Equal for the trajectories of one prompt."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    row: Mapping[str, Any] = field(default_factory=dict)
    """The row of the data that the prompt came from."""
    turn_rewards: tuple[float, ...] = ()
    """The environment's reward of each turn; () where an environment gives none."""
    state_ids: tuple[int, ...] = ()
    """The environment's state that each turn began in, −1 where it names none; () where it never does."""
    messages: tuple[Message, ...] = ()
    """The conversation as text; of a prompt given as token ids, the completion alone."""
    turn_messages: tuple[int, ...] = ()
    """Places in ``messages`` of what the policy wrote, one a turn: an environment may speak as an assistant, too. ()
    where nobody noted them: an assistant's messages are then the policy's."""
    tools: tuple[Any, ...] = ()
    """JSON schemas of the tools that the chat template was given."""
    spans: tuple[Span, ...] = ()
    """Tokens that the engine drew, request by request; all others were given. () if no engine made the trajectory."""

    def __post_init__(self) -> None:
        """Refuse fields that do not fit together.

        Raises:
            ValueError: with the field and its length or value.
        """
        length = len(self.tokens)
        if not length or len(self.loss_mask) != length or self.loss_mask[0]:
            raise ValueError(
                f"a trajectory has tokens, and a loss_mask of their number that is False on the first; "
                f"got {length} tokens and loss_mask {self.loss_mask}"
            )
        for name in ("logprobs", "weights_versions", "allowed_tokens"):
            value = getattr(self, name)
            if value is not None and len(value) != length:
                raise ValueError(f"{name} has {len(value)} entries for {length} tokens")
        for name in ("turn_rewards", "state_ids"):
            if len(getattr(self, name)) not in (0, self.turns):
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {self.turns} turns")
        if self.finish_reason not in REASONS:
            raise ValueError(f"finish_reason must be one of {', '.join(REASONS)}, got {self.finish_reason!r}")

    def labelled(
        self,
        *,
        rewards: Mapping[str, float] | None = None,
        row: Mapping[str, Any] | None = None,
        group: int | None = None,
    ) -> Self:
        """A copy with other labels; None leaves a label as it is.

        The checks of a new trajectory read no label, so a copy goes without these checks: a step labels each trajectory
        with its row and with its rewards.

        >>> t = single_turn([5], [6])
        >>> t.labelled(group=3) == replace(t, group=3), t.group
        (True, 0)
        """
        labels = {"rewards": rewards, "row": row, "group": group}
        other = object.__new__(type(self))
        vars(other).update(vars(self) | {name: label for name, label in labels.items() if label is not None})
        return other

    def require_sampled(self) -> None:
        """Refuse tokens that count in a loss and are not the engine's own, where spans say what the engine drew.

        Raises:
            ValueError: naming the token and its request.
        """
        if self.spans:
            require_sampled(self.spans, self.tokens, self.loss_mask, self.weights_versions)

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """The tokens before the first drawn one; all tokens if none was drawn."""
        return self.tokens[: self.loss_mask.index(True)] if True in self.loss_mask else self.tokens

    @property
    def sampled_tokens(self) -> tuple[int, ...]:
        """The tokens that the policy drew, of all turns."""
        return tuple(token for token, drawn in zip(self.tokens, self.loss_mask, strict=True) if drawn)

    @property
    def sampled_logprobs(self) -> tuple[float, ...]:
        """Log-probabilities of the tokens that the policy drew."""
        return tuple(value for value, drawn in zip(self.logprobs, self.loss_mask, strict=True) if drawn)

    @property
    def completion(self) -> str:
        """Text of the policy's last message, whether or not the environment answered; empty if it wrote none."""
        return "" if self.last_turn is None else self.messages[self.last_turn]["content"]

    @property
    def last_turn(self) -> int | None:
        """Place of the policy's last message in ``messages``; None if the policy wrote none.

        >>> said = tuple({"role": role, "content": role} for role in ("user", "assistant", "tool"))
        >>> single_turn([5], [6], messages=said).last_turn
        1
        """
        by_role = (place for place, message in enumerate(self.messages) if message.get("role") == "assistant")
        places = self.turn_messages or tuple(by_role)
        return places[-1] if places and self.turns else None


def single_turn(
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    version: int | Sequence[int] = 0,
    finish_reason: FinishReason = "stop",
    request_id: RequestId = (),
    **fields: Any,
) -> Trajectory:
    """A prompt and one completion. ``logprobs`` None: not drawn by a policy, 0.

    ``version``: of the weights that drew the completion, or of each of its tokens.
    """
    values = [0.0] * len(completion) if logprobs is None else logprobs
    before, after = len(prompt), len(completion)
    versions = (version,) * after if isinstance(version, int) else tuple(version)
    return Trajectory(
        tokens=(*prompt, *completion),
        loss_mask=(False,) * before + (True,) * after,
        logprobs=(0.0,) * before + tuple(values),
        weights_versions=(GIVEN,) * before + versions,
        finish_reason=finish_reason,
        request_id=request_id,
        spans=() if logprobs is None else spans_of_turn(request_id, 0, before, completion, versions),
        **fields,
    )
