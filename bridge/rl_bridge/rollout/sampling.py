"""The sampling of a token, the end of a completion, and the parameters of sampling in a request: alike for all engines.

A folder's ``generation_config.json`` may have a temperature, truncations and penalties, which vLLM and SGLang take for
every parameter that a request does not name. Log-probabilities are then of another distribution than was asked for.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rl_bridge.common.splitmix64 import mix, signed
from rl_bridge.data.trajectory import RequestId, SamplingParams
from rl_kernels import sample
from rl_kernels.sampling import SampledTokens


def draw(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, sampling: SamplingParams) -> SampledTokens:
    """A token for each row of logits [N, V], from a seed and the number of the draw [N].

    Random numbers depend on the seed and the number alone. Log-probabilities are those of the distribution that the
    tokens come from, after temperature and truncation. The allowed tokens are there where truncation can have cut some
    off.
    """
    cuts: dict[str, Any] = truncation(sampling)
    # A truncation that cuts nothing off would cost as much as one that does.
    if cuts.get("top_k", 0) >= logits.shape[1]:
        del cuts["top_k"]
    return sample(
        logits,
        temperature=float(sampling.temperature),
        seed=seeds,
        position=positions,
        return_allowed_tokens=bool(cuts),
        **cuts,
    )


def request_seeds(ids: Sequence[RequestId], samples: int) -> torch.Tensor:
    """A 64-bit seed for each request and sample, [requests, samples]: it does not change with the batch around it."""
    if not all(ids):
        raise ValueError(f"a request needs an id of at least one number, got {list(ids)}")
    places = torch.arange(samples) + 1
    if len({len(id) for id in ids}) > 1:
        return torch.cat([request_seeds([id], samples) for id in ids])
    numbers = torch.tensor([[signed(number) for number in id] for id in ids], dtype=torch.int64)
    state = mix(numbers[:, 0])
    for column in numbers[:, 1:].unbind(1):
        state = mix(state + column + 1)
    return mix(state[:, None] + places)


UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The character that a tokenizer writes for bytes that are no whole character yet."""


class StopTexts:
    """Ends a completion with the first token after which its text contains one of the texts.

    All tokens that were drawn are kept, and the last one whole: a stop text may begin in the middle of a token, and end
    in the middle of one. No text is encoded, so tokens in are tokens out. The text is that of the completion alone, the
    prompt's end is no part; special tokens have their names in the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        """``texts``: where several are complete after one token, the one that begins first counts, then this order."""
        self._tokenizer, self.texts = tokenizer, tuple(texts)
        self.longest = max(map(len, texts), default=0)

    def __bool__(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self.texts)

    def begin(self, said: Sequence[int] = ()) -> "CompletionText":
        """The text of a completion that has these tokens so far."""
        text = CompletionText(self)
        for token in said:
            text.add(token)
        return text

    def found(self, tokens: Sequence[int]) -> str | None:
        """The stop text that a completion of these tokens ends with, as ``CompletionText.add`` says."""
        text, stop_text = self.begin(), None
        for token in tokens if self.texts else ():
            stop_text = text.add(token)
        return stop_text

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens as it is: nothing left out, nothing tidied up."""
        decoded = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(decoded)

    def first_in(self, text: str) -> str | None:
        """The stop text that begins first."""
        places = [(place, number) for number, stop in enumerate(self.texts) if (place := text.find(stop)) >= 0]
        return self.texts[min(places)[1]] if places else None


class CompletionText:
    """The end of a completion's text, token by token; a token costs the same however long the text is."""

    def __init__(self, stops: StopTexts) -> None:
        self._stops = stops
        self._window: list[int] = []
        """The tokens of the last whole characters, which a tokenizer must see to write what follows, and all behind."""
        self._settled = 0
        """How many tokens at the window's beginning are in ``_tail``."""
        self._tail = ""
        """The last characters of which a stop text may still be the continuation."""

    def add(self, token: int) -> str | None:
        """The stop text that is complete with this token, or None."""
        stops = self._stops
        self._window.append(token)
        before, whole = stops.decode(self._window[: self._settled]), stops.decode(self._window)
        added = whole[len(before) :]
        stop_text = stops.first_in(self._tail + added.rstrip(UNFINISHED))
        if not whole.endswith(UNFINISHED):
            self._tail = (self._tail + added)[-(stops.longest - 1) :] if stops.longest > 1 else ""
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
        return stop_text


def truncation(sampling: SamplingParams) -> dict[str, float]:
    """The steps of truncation that can cut something off; none where sampling is greedy.

    >>> truncation(SamplingParams(max_new_tokens=1, top_p=1.0, min_p=0.1))
    {'min_p': 0.1}
    """
    cuts = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    if sampling.temperature == 0:
        return {}
    return {name: value for name, value in cuts.items() if value is not None and not (name == "top_p" and value == 1)}


def pinned(sampling: SamplingParams) -> dict[str, Any]:
    """Every parameter of sampling by its name in vLLM, SGLang and OpenAI's protocol; those not asked for are neutral.

    An engine that gets all of them takes none from its model's folder.

    >>> pinned(SamplingParams(max_new_tokens=1, top_k=5))["top_k"], pinned(SamplingParams(max_new_tokens=1))["top_k"]
    (5, -1)
    """
    cuts = truncation(sampling)
    return {
        "temperature": float(sampling.temperature),
        "top_k": int(cuts.get("top_k", -1)),
        "top_p": float(cuts.get("top_p", 1.0)),
        "min_p": float(cuts.get("min_p", 0.0)),
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def refuse_together(sampling: SamplingParams, pairs: Iterable[tuple[str, str]], engine: str) -> None:
    """Refuse truncations whose result depends on their order, where that is not top-k, top-p, min-p, or not known.

    Raises:
        ValueError: naming both.
    """
    cuts = truncation(sampling)
    for first, second in pairs:
        if first in cuts and second in cuts:
            raise ValueError(
                f"{engine} may cut by {first} and {second} in another order than this library (top_k, top_p, min_p), "
                f"which is another distribution: ask for one of them, got {cuts}"
            )
