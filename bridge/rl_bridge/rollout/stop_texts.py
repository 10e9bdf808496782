"""Text that ends a completion, found while tokens are drawn: one rule for every engine."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are no whole character yet."""


class StopTexts:
    """Ends a completion with the first token after which its text contains one of the texts.

    All tokens that were drawn are kept, and that last one whole: a stop text may begin in the middle of a token, and
    end in the middle of one. No text is encoded, so tokens in are tokens out. The text is that of the completion alone,
    the prompt's end is no part; special tokens have their names in it.
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
        text, found = self.begin(), None
        for token in tokens if self.texts else ():
            found = text.add(token)
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text as it is: nothing left out, nothing tidied up."""
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
        found = stops.first_in(self._tail + added.rstrip(UNFINISHED))
        if not whole.endswith(UNFINISHED):
            self._tail = (self._tail + added)[-(stops.longest - 1) :] if stops.longest > 1 else ""
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
        return found
