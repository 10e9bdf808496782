"""``Trajectory``: a prompt and all turns as the model saw them, with what is known of each token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rl_bridge.data.requests import Message, RequestId
from rl_bridge.data.spans import GIVEN, Span, require_sampled, spans_of_turn

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
    """Of drawn tokens, under the distribution that they were drawn from; 0 elsewhere."""
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
    spans: tuple[Span, ...] = ()
    """What the engine drew, request by request; all other tokens were given. () of a trajectory that no engine made."""

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

    def require_sampled(self) -> None:
        """Refuse tokens that count in a loss and are not the engine's own, where spans say what the engine drew.

        Raises:
            ValueError: naming the token and its request.
        """
        if self.spans:
            require_sampled(self.spans, self.tokens, self.loss_mask, self.weights_versions)

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """What stands before the first drawn token; everything if none was drawn."""
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
        """Text of the last message if the policy wrote it, else empty."""
        last: Message = self.messages[-1] if self.messages else {}
        return last["content"] if last.get("role") == "assistant" else ""


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
    given = [0.0] * len(completion) if logprobs is None else logprobs
    before, after = len(prompt), len(completion)
    versions = (version,) * after if isinstance(version, int) else tuple(version)
    return Trajectory(
        tokens=(*prompt, *completion),
        loss_mask=(False,) * before + (True,) * after,
        logprobs=(0.0,) * before + tuple(given),
        weights_versions=(GIVEN,) * before + versions,
        finish_reason=finish_reason,
        request_id=request_id,
        spans=() if logprobs is None else spans_of_turn(request_id, 0, before, completion, versions),
        **fields,
    )
