"""Rows from the user's files: what a row may look like, how it is read and checked, and an endless stream of rows."""

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from numbers import Number
from pathlib import Path
from typing import Any, Generic, TypeVar

from rl_bridge.data.census import SourceCensus
from rl_bridge.data.messages import (
    ARGUMENTS,
    arguments_of,
    in_one_form,
    is_trained,
    messages_of_field,
    require_characters,
    shortened,
    shown,
    tools_of,
    without_keys_of_others,
)
from rl_bridge.data.row_contents import Unreadable, rows_in
from rl_bridge.data.row_files import SUFFIXES, files_of, split_of
from rl_bridge.data.row_readers import RowSource, is_file_of_reader, name_of, rows_of
from rl_bridge.data.unread_keys import ROW_KEYS, SUPERVISED_KEYS, UnreadColumns

# Forms of a row: supervised rows and rows of prompts, each in one form after the check.

PROMPTS = ("prompt", "messages")
"""Fields that may hold what the model reads."""
RESPONSES = ("response", "completion", "answer")
"""Fields that may hold what the model is to say, in the order in which they are looked for."""


def policy_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row to sample from: ``prompt`` as text or messages, or ``messages``; any other columns stay.

    >>> policy_row({"messages": [{"role": "user", "content": "1+1"}], "answer": "2"})["prompt"]
    [{'role': 'user', 'content': '1+1'}]

    Raises:
        ValueError: with the field and what was expected.
    """
    row = _with_tools(in_one_form(row, PROMPTS))
    if missing(row, "prompt") and missing(row, "messages"):
        raise lacking(row, PROMPTS, "a row to sample from needs a prompt", "field 'prompt' is missing")
    if not missing(row, "prompt"):
        prompt = _prompt(row["prompt"])
        _require_one_prompt(row, prompt)
        if isinstance(prompt, list) and isinstance(prompt[-1], Mapping) and prompt[-1]["role"] == "assistant":
            raise ValueError("prompt ends with the assistant's message, so there is nothing to sample")
        return {**row, "prompt": prompt}
    messages = messages_of_field(row["messages"], "messages")
    if messages[-1]["role"] == "assistant":
        raise ValueError("messages ends with the assistant's, so there is nothing to sample; expected a prompt")
    return {**row, "messages": messages, "prompt": messages}


def answered_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row to sample from whose ``answer`` a completion is compared with.

    >>> answered_row({"prompt": "1+1=", "answer": None})
    Traceback (most recent call last):
    ValueError: answer must be text or a number to be compared (the reward 'exact'), got None; the row has \
['answer', 'prompt']

    Raises:
        ValueError: with the field and what was expected.
    """
    read = policy_row(row)
    if not is_comparable(read.get("answer")):
        got = f"{read.get('answer')!r:.80}; the row has {sorted(map(str, row))}"
        raise ValueError(f"answer must be text or a number to be compared (the reward 'exact'), got {got}")
    return read


def is_comparable(answer: Any) -> bool:
    """Whether a completion may equal the answer: text, or a number that is one."""
    return isinstance(answer, str | int) or (isinstance(answer, float) and math.isfinite(answer))


def text_of(value: Any) -> str:
    """The text of a response or an answer; a whole number is one in a column of floats, as one with a hole is.

    >>> text_of(4.0), text_of(2.5), text_of(" 4")
    ('4', '2.5', ' 4')
    """
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return str(int(value) if whole else value)


def supervised_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row to imitate: ``messages`` with a message of the assistant, or ``prompt`` and a response.

    The response is in ``response``, ``completion`` or ``answer``: text, a number, or messages of the assistant and of
    tools. Without one, a prompt may stand beside the messages that hold it, which are then what is imitated.

    Raises:
        ValueError: with the field and what was expected.
    """
    row = _with_tools(in_one_form(row, (*PROMPTS, *RESPONSES)))
    field = response_field(row)
    if not missing(row, "prompt") and (field is not None or missing(row, "messages")):
        if field is None:
            names = ", ".join(map(repr, RESPONSES))
            raise lacking(row, RESPONSES, "there is nothing to learn", f"a row with 'prompt' needs one of {names}")
        prompt = _prompt(row["prompt"])
        behind = _require_one_prompt(row, prompt)
        response = _response(row[field], field)
        if any(message["role"] == "assistant" for message in behind) and not _says(behind, response):
            raise ValueError(
                f"messages and {field} both hold what the assistant is to say, and differ; give one of them"
            )
        return {**row, "prompt": prompt, field: response}
    if missing(row, "messages"):
        needed = "'messages', or 'prompt' and a response"
        raise lacking(row, PROMPTS, f"a row needs {needed}", f"expected {needed}")
    messages = messages_of_field(row["messages"], "messages")
    if not missing(row, "prompt"):
        _require_one_prompt(row, _prompt(row["prompt"]))
    if messages[-1]["role"] != "assistant" and field is not None:
        return {**row, "messages": messages, "prompt": messages, field: _response(row[field], field)}
    if all(message["role"] != "assistant" for message in messages):
        roles = [message["role"] for message in messages]
        raise ValueError(f"messages has none of the assistant, so there is nothing to learn; its roles are {roles}")
    if not any(map(is_trained, messages)):
        raise ValueError("every message of the assistant says that it is not trained on (weight, loss, train)")
    # A template may read other keys than content, as of tool calls or of reasoning.
    learned = [shown(message).items() for message in messages if is_trained(message)]
    if not any(value for items in learned for key, value in items if key not in ("role", "name")):
        raise ValueError("every message of the assistant in messages is empty: there is nothing to learn")
    return {**row, "messages": messages}


def imitated_field(row: Mapping[str, Any]) -> str:
    """The field of a read row to imitate that holds what is imitated."""
    field = response_field(row)
    return "messages" if field is None or missing(row, "prompt") else field


def response_field(row: Mapping[str, Any]) -> str | None:
    """The field that holds the row's response; None if there is none."""
    return next((name for name in RESPONSES if not missing(row, name)), None)


def missing(row: Mapping[str, Any], field: str) -> bool:
    """Whether the field is absent or says nothing: None, "" or []. Zero and False say something."""
    value = row.get(field)
    return value is None or (isinstance(value, str | list | tuple) and not value)


def lacking(
    row: Mapping[str, Any], fields: Sequence[str], needed: str, otherwise: str, read: Mapping[str, Any] | None = None
) -> ValueError:
    """The error that none of the fields says anything: with what is there, or ``otherwise`` with the row's columns."""
    kinds = {str: "empty text", type(None): "null"}
    nothing = [
        f"{name!r} is {kinds.get(type(row[name]), 'an empty list')}"
        for name in fields
        if name in row and missing(row, name)
    ]
    if nothing:
        return ValueError(f"{' and '.join(nothing)}: {needed}")
    return ValueError(f"{otherwise}; the row has {sorted(map(str, row if read is None else read))}")


def _with_tools(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its ``tools`` and ``chat_template_kwargs``, where it has them, in one spelling."""
    tools, arguments = list(tools_of(row)), arguments_of(row)
    read: dict[str, Any] = {"tools": tools, ARGUMENTS: arguments}
    return {**row, **{name: value for name, value in read.items() if row.get(name)}}


def _prompt(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return value
    if not (isinstance(value, list) and all(isinstance(m, Mapping) and "role" in m for m in value)):
        raise ValueError(f"prompt must be text or messages with role and content, got {shortened(value)}")
    return messages_of_field(value, "prompt")


def _require_one_prompt(row: Mapping[str, Any], prompt: Any) -> list[dict[str, Any]]:
    """Messages of the row behind its prompt; refuse messages that do not hold the prompt."""
    if missing(row, "messages"):
        return []
    return behind_prompt(messages_of_field(row["messages"], "messages"), prompt, "messages")


def behind_prompt(messages: Sequence[dict[str, Any]], prompt: Any, name: str) -> list[dict[str, Any]]:
    """The messages behind the prompt. A prompt that is text is the content of one of them.

    Raises:
        ValueError: the messages, whose column is ``name``, do not hold the prompt.
    """
    if isinstance(prompt, str):
        places = [place for place, message in enumerate(messages) if message["content"].strip() == prompt.strip()]
        end = places[-1] + 1 if places else None
    else:
        end = len(prompt) if list(messages[: len(prompt)]) == prompt else None
    if end is None:
        raise ValueError(f"prompt and {name} are both given, and the {name} do not hold the prompt; give one")
    return list(messages[end:])


def unread_responses(row: Mapping[str, Any]) -> list[str]:
    """Columns of a read row to imitate that hold a response, another one than the row's.

    >>> unread_responses({"messages": [{"role": "assistant", "content": "It is 2"}], "answer": "2"})
    ['answer']
    """
    field = imitated_field(row)
    imitated = row["messages"][-1:] if field == "messages" else row[field]
    turns = imitated if isinstance(imitated, list) else [{"content": imitated}]
    return [name for name in RESPONSES if not missing(row, name) and not _says(turns, row[name])]


def _says(messages: Sequence[Mapping[str, Any]], response: Any) -> bool:
    """Whether these messages are the response, which is text or messages."""
    if isinstance(response, list):
        return list(messages) == response
    return len(messages) == 1 and text_of(messages[0]["content"]).strip() == text_of(response).strip()


def _response(value: Any, field: str) -> Any:
    if isinstance(value, list):
        messages = messages_of_field(value, field)
        if any(message["role"] not in ("assistant", "tool", "user") for message in messages):
            roles = [message["role"] for message in messages]
            raise ValueError(f"{field} holds the assistant's messages, got roles {roles}")
        if all(message["role"] != "assistant" for message in messages):
            raise ValueError(f"{field} has no message of the assistant")
        if not any(map(is_trained, messages)):
            raise ValueError(f"{field}: every message of the assistant says that it is not trained on")
        return messages
    is_no_number = isinstance(value, float | Decimal) and not math.isfinite(value)
    if not isinstance(value, str | Number | date | time) or is_no_number:
        raise ValueError(f"{field} must be text or messages, got {shortened(value)}")
    return value


# Rows from the user's files: JSON, JSONL, CSV, Parquet, Arrow, or a Hugging Face dataset; checked row by row.

SHOWN = 5
"""Bad rows that an error names; the others are counted."""
PARAGRAPH = 500
"""Characters of their reasons, of which the first is shown whatever it has."""


def read_rows(
    source: RowSource,
    *,
    fields: Sequence[str] = ("prompt",),
    check: Callable[[Mapping[str, Any]], dict[str, Any]] = policy_row,
    census: SourceCensus | None = None,
) -> list[dict[str, Any]]:
    """All rows of ``source``, each as ``check`` returns it, with the ``fields``; ``_where`` has its file and number.

    ``source`` is a file by its suffix, a folder of such files, a folder written by ``save_to_disk``, or the name of a
    dataset that ``datasets.load_dataset`` finds. Its configuration follows as ``NAME/CONFIGURATION``, in folders with
    configurations too, and a split as ``SOURCE@SPLIT`` or ``NAME:SPLIT`` (``train`` unless named); a part of it as
    ``train[10:20]``. Or it is a reader: ``FILE.py:function``, a function in hand without
    arguments or of the split's name that yields rows as dicts, or an iterable of rows.

    ``check`` takes a row and returns it in the form that is trained on, or raises ValueError with the field and what
    was expected: ``policy_row``, ``supervised_row``. Columns that other libraries read and this one does not are named.
    ``census`` gets the numbers of files and rows.

    Raises:
        FileNotFoundError: no such file.
        TypeError: a reader that takes other arguments, or gives no rows.
        ValueError: rows that cannot be read, lack a field, or are refused by ``check``: the first few with file or
            function and row number, and how many others.
    """
    rows: list[dict[str, Any]] = []
    unread = UnreadColumns((*ROW_KEYS, *SUPERVISED_KEYS) if check is supervised_row else ROW_KEYS)
    bad: list[str] = []
    census = SourceCensus() if census is None else census
    census.name = name_of(source)
    for where, row in _numbered(source, census):
        try:
            rows.append(_checked(row, fields, check) | {"_where": where})
            unread.look(row, where, unread_responses(rows[-1]) if check is supervised_row else ())
        except ValueError as error:
            bad.append(f"{where}: {error}")
    refuse(bad, len(bad) + len(rows))
    if not rows:
        raise ValueError(f"{name_of(source)} has no rows")
    sampled = check in (policy_row, answered_row)
    census.read = len(rows)
    unread.remark(but_by=" (but by a reward or an environment of your own)" if sampled else "")
    return rows


def refuse(bad: Sequence[str], total: int) -> None:
    """Raise ValueError for what is wrong with ``bad`` of ``total`` rows, if anything is: the first few in words."""
    if bad:
        bad = _by_row(bad)
        # What is wrong with all of them is said once.
        same = len(bad) > 1 and len({reason.partition(": ")[2] for reason in bad}) == 1
        others = ", ".join(reason.partition(": ")[0] for reason in bad[1:SHOWN])
        reasons = [bad[0], f"the same in {others}"] if same else _fitting(bad[:SHOWN])
        count = len(bad) - (min(len(bad), SHOWN) if same else len(reasons))
        more = [f"and {count} more bad rows of {total}"] if count else []
        raise ValueError("; ".join([*reasons, *more]))


def _by_row(reasons: Sequence[str]) -> list[str]:
    """The reasons in the order of each file's rows, for a split has shuffled these."""
    files: dict[str, int] = {}

    def place(reason: str) -> tuple[int, int]:
        match = re.match(r"(.*?)\brow (\d+)", reason)
        name, number = ("", "0") if match is None else match.groups()
        return files.setdefault(name, len(files)), int(number)

    return sorted(reasons, key=place)


def _fitting(reasons: Sequence[str]) -> list[str]:
    """The first reason, and the next ones while all are a paragraph."""
    texts = [reasons[0]]
    for reason in reasons[1:]:
        if sum(len(text.partition(": ")[2]) for text in [*texts, reason]) > PARAGRAPH:
            break
        texts.append(reason)
    return texts


def _checked(row: Any, fields: Sequence[str], check: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    if isinstance(row, Unreadable):
        raise ValueError(row.reason)
    if not isinstance(row, dict):
        expected = f"an object with fields {', '.join(fields)}" if fields else "an object with the row's fields"
        raise ValueError(f"expected {expected}, got {type(row).__name__}")
    require_characters(row)
    checked = check(row)
    for field in fields:
        if missing(checked, field):
            raise lacking(checked, (field,), "a row needs it", f"field {field!r} is missing", row)
    return checked


def _numbered(source: RowSource, census: SourceCensus) -> Iterator[tuple[str, Any]]:
    """The rows, each with its place as an error names it; ``census`` gets the number of files."""
    if not isinstance(source, str) or is_file_of_reader(source):
        yield from rows_of(source)
        return
    files = files_of(source)
    if files is None:
        rows = enumerate(_hugging_face(source), 1)
        yield from ((f"{source}, row {number}", without_keys_of_others(row)) for number, row in rows)
        return
    census.files = len(files.paths)
    places = ((f"{file}, row {number}", row) for file in files.paths for number, row in rows_in(file))
    yield from places if files.part is None else _part(source, files.part, list(places))


def rows_of_hub(source: str) -> Iterator[Any] | None:
    """The rows of a dataset of the hub as ``read_rows`` gets them, with their places; None for what lies here.

    Raises:
        FileNotFoundError, ValueError: no such file; of a dataset that there is not, with its first row.
    """
    if is_file_of_reader(source) or Path(split_of(source)[0]).is_dir() or files_of(source) is not None:
        return None
    return ({**row, "_where": where} for where, row in _numbered(source, SourceCensus()))


def _part(source: str, split: str, rows: list[Any]) -> list[Any]:
    """The rows of ``train[10:20]``; a file is one split, ``train``."""
    match = re.fullmatch(r"(?:train)?(?:\[(-?\d+)?:(-?\d+)?\])?", split)
    if match is None:
        raise ValueError(f"{source!r}: a file has one split, 'train', or a part as 'train[10:20]'; got {split!r}")
    start, stop = (int(number) if number else None for number in match.groups())
    return rows[start:stop]


def _hugging_face(source: str) -> Iterable[Any]:
    import datasets

    name, split = split_of(source)
    path = Path(name)
    if path.is_dir():
        try:
            saved: Any = datasets.load_from_disk(str(path))
        except Exception as error:  # of JSON, of Arrow, of the file system
            raise ValueError(f"{path} is a saved dataset that cannot be loaded: {error}") from error
        if not isinstance(saved, Mapping):
            return _part(source, split, list(saved)) if split else saved
        split_name, bracket, rest = (split or "train").partition("[")
        if split_name not in saved:
            raise ValueError(f"{source} has no split {split_name!r}; it has {', '.join(map(repr, saved))}")
        return _part(source, bracket + rest, list(saved[split_name])) if bracket else saved[split_name]
    match = _CONFIGURATION.fullmatch(name)
    words = (name,) if match is None else match.groups()
    try:
        return datasets.load_dataset(*words, split=split or "train")
    except Exception as error:
        if several := re.search(r"available configs: \[(.*)\]", str(error)):
            raise ValueError(
                f"{source!r} has the configurations {several[1]}, which are not mixed unasked: name one, as "
                f"{words[0]}/{several[1].partition(',')[0].strip(chr(39))}@{split or 'train'}"
            ) from error
        suffixes = ", ".join(SUFFIXES)
        raise ValueError(f"{source!r} is neither a file ({suffixes}) nor a dataset that loads: {error}") from error


_CONFIGURATION = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/([^/]+)")
"""The name of a dataset of the hub with one of its configurations."""

# An endless stream of rows: shuffled anew each epoch, its place in the data part of a checkpoint.

Row = TypeVar("Row")


class RowStream(Generic[Row]):
    """Every row once an epoch, in an order that depends on the seed and the epoch alone."""

    def __init__(self, rows: Sequence[Row], seed: int) -> None:
        if not len(rows):
            raise ValueError("there are no rows to train on")
        self._rows = rows
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled()

    def take(self, count: int) -> list[Row]:
        """The next ``count`` rows; an epoch's end in the middle of them is no boundary."""
        rows: list[Row] = []
        while len(rows) < count:
            stop = min(len(self._order), self._position + count - len(rows))
            rows += [self._rows[i] for i in self._order[self._position : stop]]
            self._position = stop
            if stop == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffled()
        return rows

    def checkpoint_state(self) -> dict[str, Any]:
        """The place in the data."""
        return {"epoch": self._epoch, "position": self._position, "rows": len(self._rows), "seed": self._seed}

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Go on at a saved place; other data than was saved raises."""
        if (state["rows"], state["seed"]) != (len(self._rows), self._seed):
            raise ValueError(
                f"the checkpoint was made on {state['rows']} rows with seed {state['seed']}, "
                f"this run has {len(self._rows)} rows and seed {self._seed}"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self._rows)))
        random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order
