"""The census of a run's rows: files, rows read, left out by each cause, held out, trained on. The parts add up."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_bridge.common.terminal import remark, tell

SAME_PROMPT = "their prompts are those of held-out rows (--held-out)"


def too_long(max_length: int) -> str:
    """The cause for which rows of more tokens are left out.

    >>> too_long(40)
    'they have more than 40 tokens (--max-length)'
    """
    return f"they have more than {max_length} tokens (--max-length)"


@dataclass(kw_only=True)
class SourceCensus:
    """The rows of one source: how many there are, and where each of them is."""

    name: str = "the rows"
    files: int | None = None
    """Files with rows in them or not; None for a source that is no files: a reader, a dataset of the hub."""
    read: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    """Cause → rows."""
    held_out: int = 0
    trained: int = 0

    def leave_out(self, cause: str, count: int) -> None:
        """Count rows that are neither trained on nor held out, and remark on them."""
        if count:
            self.left_out[cause] = self.left_out.get(cause, 0) + count
            remark(f"{self.name}: {count} of {self.read} rows are left out: {cause}")

    def line(self) -> str:
        """The numbers in words.

        >>> SourceCensus(name="a.jsonl", files=1, read=9, trained=6, held_out=2, left_out={"they are long": 1}).line()
        'a.jsonl: 9 rows of 1 file: 6 trained on, 2 held out, 1 left out: they are long'
        """
        files = "" if self.files is None else f" of {self.files} file{'s' * (self.files != 1)}"
        parts = [(self.trained, "trained on"), (self.held_out, "held out")]
        parts += [(count, f"left out: {cause}") for cause, count in self.left_out.items()]
        places = ", ".join(f"{count} {place}" for count, place in parts if count)
        return f"{self.name}: {self.read} rows{files}: {places}"


@dataclass(kw_only=True)
class Census:
    """The rows of a run by their source.

    >>> census = Census(data=SourceCensus(name="a.jsonl", files=1, read=3))
    >>> census.settle(trained=2, held_out=1, step={"--rows-per-step": 2})
    rows: a.jsonl: 3 rows of 1 file: 2 trained on, 1 held out
    """

    data: SourceCensus = field(default_factory=SourceCensus)
    eval_data: SourceCensus | None = None
    """None: the held-out rows are rows of ``data``."""
    content: str | None = field(default=None, compare=False)
    """The fingerprint of all rows as they were read, whatever the seed holds out; None: nobody took it."""

    @classmethod
    def of_rows(cls, train: Sequence[Any], held_out: Sequence[Any]) -> "Census":
        """Rows in hand, all of which are trained on or held out."""
        counts: dict[str, Any] = {"read": len(train) + len(held_out), "trained": len(train), "held_out": len(held_out)}
        return cls(data=SourceCensus(**counts))

    @property
    def of_held_out(self) -> SourceCensus:
        """The source of the held-out rows."""
        return self.data if self.eval_data is None else self.eval_data

    def leave_out(self, cause: str, trained: int, held_out: int) -> None:
        """Count rows to train on and held-out rows that are left out."""
        if self.eval_data is None:
            self.data.leave_out(cause, trained + held_out)
        else:
            self.data.leave_out(cause, trained)
            self.eval_data.leave_out(cause, held_out)

    def settle(self, *, trained: int, held_out: int, step: Mapping[str, int], examples: int | None = None) -> None:
        """Count the rows that are left, and print all numbers.

        ``step``: option → rows that one step takes. ``examples``: what a step takes of the rows, if not the rows.

        Raises:
            ValueError: rows were left out, and those to train on are fewer than one step takes.
        """
        self.data.trained, self.of_held_out.held_out = trained, held_out
        for source in self._sources():
            places = source.trained + source.held_out + sum(source.left_out.values())
            assert source.read == places, f"{source.name}: {source.read} rows were read, and {places} are somewhere"
        tell(f"rows: {'; '.join(source.line() for source in self._sources())}")
        rest = trained if examples is None else examples
        for option, count in step.items():
            if self.data.left_out and rest < count:
                causes = ", ".join(f"{number} rows: {cause}" for cause, number in self.data.left_out.items())
                as_examples = "" if rest == trained else f" as {rest} examples"
                raise ValueError(
                    f"{self.data.name}: of {self.data.read} rows {trained} are left to train on{as_examples}, and one "
                    f"step takes {count} ({option}); left out are {causes}. Change one of these options"
                )
            if count > rest > 0:
                times = f"{count // rest}" if count % rest == 0 else f"{count // rest} to {count // rest + 1}"
                remark(f"{option} {count} of {rest} rows to train on: every step takes each of them {times} times")

    def summary(self) -> dict[str, Any]:
        """The entries of a run's ``summary.json``."""
        return {
            "rows": self.data.trained,
            "held_out": self.of_held_out.held_out,
            "left_out": sum(count for source in self._sources() for count in source.left_out.values()),
            "census": {
                option: dict(vars(source))
                for option, source in zip(("data", "eval_data"), self._sources(), strict=False)
            },
        }

    def _sources(self) -> Iterator[SourceCensus]:
        yield self.data
        if self.eval_data is not None:
            yield self.eval_data
