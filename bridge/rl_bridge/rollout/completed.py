"""What a decoder drew after a prompt, as a trajectory."""

from collections.abc import Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from rl_bridge.data.requests import Request
from rl_bridge.data.trajectory import Trajectory, single_turn
from rl_bridge.models.encoding import messages_of
from rl_bridge.rollout.stop_texts import StopTexts


class DrawnCompletion(Protocol):
    """A whole completion."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def allowed(self) -> Sequence[Sequence[int]] | None: ...
    @property
    def reason(self) -> Any: ...


def completed(
    tokenizer: PreTrainedTokenizerBase,
    request: Request,
    sample: int,
    prompt: Sequence[int],
    drawn: DrawnCompletion,
    version: int | Sequence[int],
    stop: Sequence[str] = (),
) -> Trajectory:
    """Sample number ``sample`` of a request, one of whose texts ``stop`` may have ended it.

    ``version``: of the weights that drew it, or of each of its tokens. The message's text is without the token that
    ended it, and with the text that did: the tokens behind it are all kept.
    """
    by_text = StopTexts(tokenizer, stop).found(drawn.tokens) if drawn.reason == "stop" else None
    ended = drawn.reason == "stop" and by_text is None
    text = str(tokenizer.decode(list(drawn.tokens[:-1] if ended else drawn.tokens)))
    return single_turn(
        prompt,
        drawn.tokens,
        logprobs=drawn.logprobs,
        version=version,
        finish_reason=drawn.reason,
        stop_reason=by_text,
        allowed_tokens=None if drawn.allowed is None else (*[()] * len(prompt), *drawn.allowed),
        request_id=(*request.id, sample),
        group=request.group,
        messages=(*messages_of(request.prompt), {"role": "assistant", "content": text}),
    )
