"""A loop's model and its rows: loaded, checked row by row, and taken in an order that a checkpoint keeps."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from types import NoneType
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl_bridge.common.argument_kinds import check_call, require_default, require_kind
from rl_bridge.common.terminal import remark, tell
from rl_bridge.data.census import SourceCensus
from rl_bridge.data.comparisons import PairBatch, read_comparisons
from rl_bridge.data.examples import Example, batch_of, rows_in
from rl_bridge.data.messages import Chat, in_one_form, shortened
from rl_bridge.data.row_readers import RowSource, reader_fingerprint
from rl_bridge.data.rows import PROMPTS, RowStream, missing, policy_row, read_rows, supervised_row, unread_responses
from rl_bridge.data.tasks import split_rows
from rl_bridge.data.token_batch import TokenBatch, collate
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.data.unread_keys import ROW_KEYS, SUPERVISED_KEYS, KeyMemory, UnreadColumns, remark_on_keys
from rl_bridge.loop.changes import change, note_scorer
from rl_bridge.loop.encoded import encoded, encoded_comparisons, has_roles, marked, pad_of_rewards, remark_on_unread
from rl_bridge.models.chat_templates import dates_of
from rl_bridge.models.model_source import ModelSource, PretrainedSource
from rl_bridge.models.own_class import Factory, factory_of, is_file_of_class, name_of
from rl_bridge.models.own_model import OwnSource, own_source
from rl_bridge.models.pretrained import new_for_rows, pretrained, tokenizer_of
from rl_bridge.models.row_checks import (
    chat_of_row,
    check_rows,
    prompted,
    remark_on_conversations,
    remark_on_prompts,
    remark_on_words,
    supervised,
)
from rl_bridge.models.turn_ends import remark_on_ends
from rl_bridge.modules.comparison import REWARD_LOSSES, SHIFT_MOMENTUM, ComparisonLoss
from rl_bridge.pipelines.training import own_fingerprints
from rl_bridge.run.provenance import UNDIVIDED, of_folder, of_rows
from rl_bridge.run.run import Stateful

Check = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Model:
    """Where weights come from, and their tokenizer. ``load_model`` makes one of a folder; a test makes a tiny one.

    >>> from rl_bridge.models.small import TinySource, character_tokenizer
    >>> tokenizer = character_tokenizer("0123456789+=")
    >>> Model(TinySource.for_tokenizer(tokenizer, hidden=16), tokenizer).pad_token
    0
    """

    source: ModelSource
    tokenizer: PreTrainedTokenizerBase
    settled: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The unread columns that were named of prompts, and of rows to imitate; and keys, by the chat template."""

    @property
    def pad_token(self) -> int:
        """The id that batches are padded with."""
        pad = self.tokenizer.pad_token_id
        assert isinstance(pad, int)
        return pad

    def columns_named(self, kind: str) -> set[str]:
        """Columns of rows that were named as not read, of ``prompts`` or of rows that are ``imitated``."""
        return self.settled.setdefault(kind, set())

    def keys_met(self, kind: str) -> KeyMemory:
        """Keys of rows of this kind that the present chat template has met."""
        return self.settled.setdefault(f"{kind} by {self.tokenizer.chat_template}", KeyMemory())

    def remark(self, text: str) -> None:
        """Name something of this model once: several engines of the same model would say the same."""
        if text not in (notes := self.settled.setdefault("notes", set())):
            notes.add(text)
            remark(text)

    def remark_on_ends(self) -> None:
        """Name the ends of turns and the tokens at which generation stops where these differ, once for this model."""
        if "ends" not in self.settled:
            self.settled["ends"] = remark_on_ends(self.source, self.tokenizer)

    def fingerprints(self) -> dict[str, str]:
        """A hash of the model's files, wherever they lie now; nothing for a source without files."""
        if isinstance(self.source, OwnSource):
            return own_fingerprints(self.source, self.tokenizer) | dates_of(self.tokenizer)
        if not isinstance(self.source, PretrainedSource):
            return dates_of(self.tokenizer)
        return {"model": of_folder(self.source.folder(), tell)} | dates_of(self.tokenizer)


def load_model(
    model: str | os.PathLike[str] | Factory,
    *,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
    weights: str | Path | None = None,
    seed: int = 0,
) -> Model:
    """The model of a folder in Hugging Face format or of a hub id; or of a class of your own, with its tokenizer.

    No weights are read before an engine is made; a class of your own is made once here, in float32, and tried on a row.

    A class is a ``torch.nn.Module`` that is made without arguments, with ``forward(self, input_ids, position_ids,
    attention_mask=None)`` that returns logits [N, T, V] (``rl_bridge.models.own_model.OwnLanguageModel`` says what is
    in them), or the text ``FILE.py:Class``. ``tokenizer`` is a tokenizer or where one lies, ``weights`` a safetensors
    file under the class's own names, or a folder that ``policy.save`` wrote; without weights the model is new, drawn
    from ``seed``. Where an engine is made of it, rows that are alone, padded, packed and that share a prefix are
    compared once. What gives other numbers is not used, and that is said.

    >>> from rl_bridge import Policy, load_model
    >>> model = load_model("org/Small-1B")  # doctest: +SKIP
    >>> model = load_model(Tiny, tokenizer="org/Small-1B", weights="tiny.safetensors")  # doctest: +SKIP

    Raises:
        FileNotFoundError, ValueError: no such model, or not one of a causal language model with a tokenizer; weights
            that do not fit a class.
        TypeError: a class that lacks what a model has, by name; or what is neither a place nor a class.
    """
    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    require_kind("model", model, (str, Callable), "a folder, an id of the hub or a class of your own")
    if isinstance(model, str) and not is_file_of_class(model):
        if not (tokenizer is None and weights is None):
            raise ValueError(f"{model!r} has tokenizer and weights in its folder: those of a class alone are given")
        return Model(*pretrained(model))
    factory = factory_of(model) if isinstance(model, str) else model
    if tokenizer is None:
        raise ValueError(f"{name_of(factory)} is a class of your own: load_model(…, tokenizer=…) names its tokenizer")
    if isinstance(tokenizer, str | os.PathLike):
        tokenizer = tokenizer_of(os.fspath(tokenizer), alone=True)
    require_kind("tokenizer", tokenizer, PreTrainedTokenizerBase, "a tokenizer, or the folder or hub id of one")
    return Model(own_source(factory, tokenizer, weights=weights, seed=seed), tokenizer)


def tiny_model(rows: Sequence[Mapping[str, Any]], *, seed: int = 0) -> Model:
    """A new Qwen2 of 1 M parameters whose tokenizer has the characters of the rows' prompts and answers.

    A loop that is being written learns something with this model in minutes on a CPU.

    >>> from rl_bridge import tiny_model
    >>> tiny_model([{"prompt": "1+1=", "answer": "2"}]).tokenizer("2+1=").input_ids
    [4, 2, 3, 5]

    Raises:
        ValueError: rows whose prompts are messages, for which a model with a chat template is needed.
    """
    check_call(tiny_model, locals())
    return Model(*new_for_rows(rows, seed=seed))


@dataclass(frozen=True)
class NLL:
    """The objective of supervised fine-tuning: −log π of the tokens that the assistant says, in the mean over tokens.

    >>> from rl_bridge import NLL
    >>> NLL()
    NLL()
    """


def preference_loss(
    name: str = "dpo",
    *,
    average: bool | None = None,
    wpo: bool = False,
    shift_momentum: float = SHIFT_MOMENTUM,
    **constants: Any,
) -> ComparisonLoss:
    """A loss of ``rl_fn`` over compared completions by its name, with constants in place of its defaults.

    ``rl-fn train preference --help`` lists the names; ``bradley_terry`` and ``plackett_luce`` train a reward model.
    ``average``: the loss reads mean log-probabilities per token, not sums, by default where its paper has them.
    ``wpo`` weighs a comparison by how likely the policy is to write its completions. ``shift_momentum``: of BCO's
    moving mean of the rewards.

    >>> from rl_bridge import preference_loss
    >>> preference_loss("dpo", beta=0.2).constants
    {'beta': 0.2}

    Raises:
        ValueError: no such loss, or a constant that the loss does not take.
    """
    check_call(preference_loss, locals())
    own: dict[str, Any] = {"average": average, "wpo": wpo, "shift_momentum": shift_momentum}
    return ComparisonLoss(name=name, constants=constants, **own)


def in_hand(
    rows: Sequence[Mapping[str, Any]], check: Check = policy_row, model: Model | None = None
) -> list[dict[str, Any]]:
    """Rows of a program's own in the spelling that ``load_rows`` gives them.

    ``model`` reads them now: keys that nothing reads are named, each once.

    >>> in_hand([{"prompt": [{"role": "user", "content": [{"type": "text", "text": "1+1"}]}]}])[0]["prompt"]
    [{'role': 'user', 'content': '1+1'}]

    Raises:
        TypeError: a ``Rows`` object, of which rows are taken.
        ValueError: with the row's number, the field and what was expected.
    """
    if isinstance(rows, Rows):
        raise TypeError("rows are taken of a Rows object step by step, and this is all of it: rows.take(n)")
    checked = []
    for number, row in enumerate(rows, 1):
        try:
            if not isinstance(row, Mapping):
                raise ValueError(f"a row is an object with columns, got {shortened(row)}")
            checked.append(check(row))
        except ValueError as error:
            where = row.get("_where") if isinstance(row, Mapping) else None
            raise ValueError(f"{where or f'row {number}'}: {error}") from error
    if model is not None:
        name_unread(model, checked, check)
    return checked


def name_unread(
    model: Model, rows: Sequence[Mapping[str, Any]], check: Check = policy_row, tools: Sequence[Any] = ()
) -> None:
    """Name once for a model what nothing reads of rows: columns, keys for the chat template, words that it leaves out.

    Columns of rows that have a place, as those of a file, were named where they were read. ``tools``: schemas that the
    policy is shown with each row, in the place of the row's own.
    """
    imitated = check is supervised_row
    kind = "imitated" if imitated else "prompts"
    unread = UnreadColumns((*ROW_KEYS, *SUPERVISED_KEYS) if imitated else ROW_KEYS)
    for number, row in enumerate(rows, 1):
        if "_where" not in row:
            unread.look(row, f"row {number}", unread_responses(row) if imitated else ())
    unread.remark("" if imitated else " (but by a reward or an environment of your own)", model.columns_named(kind))
    read = (supervised if imitated else prompted)(model.tokenizer)
    memory = model.keys_met(f"{kind} with tools" if tools else kind)
    if tools:
        alone = model.keys_met(kind)
        memory.named |= alone.named
        memory.words |= alone.words
        memory.read.add("row key `tools`")  # whoever gives functions says how the policy learns of them
        rows = [{**row, "tools": tools} for row in rows]
    remark_on_keys(rows, lambda row: read(row)[1], memory)
    chats = (lambda row: [chat_of_row(row)]) if imitated else (lambda row: [Chat.of(row)])
    remark_on_words(model.tokenizer, rows, chats, generation_prompt=not imitated, memory=memory)


def any_row(row: Any) -> Any:
    """A row to sample from or to imitate in one spelling; one without text or messages is an environment's own."""
    if "_where" in row:
        return row
    row = in_one_form(row, PROMPTS)
    text = [name for name in PROMPTS if not missing(row, name)]
    if not text or not isinstance(row[text[0]], str | Sequence):
        return dict(row)
    try:
        return policy_row(row)
    except ValueError as error:
        try:
            return supervised_row(row)
        except ValueError:
            raise error from None


class Rows:
    """Every row once an epoch, in an order of the seed and the epoch alone; ``load_rows`` makes one.

    ``take`` gives rows, ``batch`` gives tensors of rows that were loaded for a loss. A run with the rows in its
    ``state`` goes on where it stopped.

    >>> rows = Rows([{"prompt": "1+1="}, {"prompt": "1+2="}], seed=1)
    >>> len({row["prompt"] for row in rows.take(2)})
    2
    """

    kind = "rows"

    def __init__(
        self,
        rows: Sequence[Any],
        *,
        seed: int = 0,
        collate: Callable[[Sequence[Any]], TokenBatch | PairBatch] | None = None,
        fingerprint: str | None = None,
        reader: Mapping[str, str] | None = None,
        census: SourceCensus | None = None,
    ) -> None:
        """``collate``: makes a batch of rows. ``fingerprint``: of what the rows were made of, if not of the rows.

        ``reader``: the mark of the source that ``load_rows`` read them of, and ``census`` how many there were.

        Raises:
            ValueError: rows that no model reads, with the number of the row.
        """
        check_call(Rows.__init__, locals())
        rows = in_hand(rows, any_row) if collate is None else rows
        self.stream = RowStream(rows, seed)
        self.rows: Sequence[Any] = rows
        self._seed, self._collate = seed, collate
        self._fingerprint = of_rows(rows) if fingerprint is None else fingerprint
        self._others = dict(reader or {})
        self._reference: dict[str, str] = {}
        """Marks of the model whose scores the rows hold."""
        self.count = len(rows)
        self.census = SourceCensus(read=self.count, trained=self.count) if census is None else census

    def __len__(self) -> int:
        return self.count

    def take(self, count: int) -> list[Any]:
        """The next ``count`` rows; behind the last row the next epoch begins.

        Raises:
            ValueError: rows were left out, and fewer than ``count`` are left; or ``count`` is no number of rows.
        """
        if not isinstance(count, Integral) or count < 0:
            raise ValueError(f"rows are taken by their number, whole and not negative, got {count!r}")
        if count > self.count and self.census.left_out:
            raise ValueError(f"a step takes {count} rows, of {self.census.line()}")
        change(self)
        return self.stream.take(count)

    def batch(self, count: int) -> Any:
        """The next ``count`` rows as a ``TokenBatch`` or a ``PairBatch``.

        Raises:
            ValueError: the rows are prompts, which were not loaded for a loss, or ``count`` is below 1.
        """
        if count < 1:
            raise ValueError(f"a batch has at least one row, got {count}")
        if self._reference:
            note_scorer("cached reference", lambda marks=self._reference: marks)
        return self._batch(self.take(count))

    def all(self) -> Any:
        """All rows in their own order as one ``TokenBatch`` or ``PairBatch``: held-out rows, to be measured on.

        Raises:
            ValueError: the rows are prompts, which were not loaded for a loss.
        """
        return self._batch(self.rows)

    def hold_out(self, count: int) -> "tuple[Rows, list[dict[str, Any]]]":
        """(The rows to train on, ``count`` rows that are held out), of prompts that differ.

        >>> rows, held_out = Rows([{"prompt": "1+1="}, {"prompt": "1+2="}, {"prompt": "1+3="}]).hold_out(1)
        >>> held_out[0]["prompt"] in {row["prompt"] for row in rows.take(2)}
        False

        Raises:
            ValueError: too few prompts, or rows that were loaded for a loss.
        """
        if self._collate is not None:
            raise ValueError("these rows are encoded for a loss: hold_out is for prompts, which a reward scores")
        train, held_out = split_rows(self.rows, count, self._seed)
        counts = {"trained": len(train), "held_out": self.census.held_out + len(held_out)}
        census = replace(self.census, **counts, left_out=dict(self.census.left_out))
        census.leave_out("their prompts are those of held-out rows", len(self.rows) - len(train) - len(held_out))
        rows = Rows(train, seed=self._seed, census=census)
        rows._others = {UNDIVIDED: self._fingerprint, **self._others}
        return rows, held_out

    def exchange(self, rows: Sequence[Any], marks: Mapping[str, str]) -> None:
        """Put other rows in the places of these: the same ones, with what a model of these ``marks`` knows of each."""
        self._reference = dict(marks)
        stream = RowStream(rows, self._seed)
        stream.load_checkpoint_state(self.stream.checkpoint_state())
        self.rows, self.stream = rows, stream

    def _batch(self, rows: Sequence[Any]) -> TokenBatch | PairBatch:
        if self._collate is None:
            raise ValueError("these rows are prompts: load_rows(data, model, loss) makes rows that a loss reads")
        return self._collate(rows)

    def parts(self) -> dict[str, Stateful]:
        """The place in the data."""
        return {"rows": self.stream}

    def settings(self) -> dict[str, Any]:
        """Nothing: the place in the data compares number and seed itself."""
        return {}

    def fingerprints(self) -> dict[str, str]:
        """Hash of the rows, of the file of a reader of your own, and of the rows that ``hold_out`` divided."""
        return {"data": self._fingerprint, **self._others}


def load_rows(
    data: RowSource | os.PathLike[str],
    model: Model | None = None,
    loss: NLL | ComparisonLoss | None = None,
    *,
    seed: int = 0,
    apply_chat_template: bool = True,
    max_length: int | None = None,
    new_tokens: int = 0,
) -> Rows:
    """The rows of a file, a folder, a hub data set (``SOURCE@SPLIT``) or a reader of your own, each checked.

    A reader is a function without arguments, or of the split's name, that yields rows as dicts: in hand or as
    ``FILE.py:function``; rows in hand are taken, too. A run that is resumed notices another reader.

    Without ``loss`` the rows are prompts to sample from: ``prompt`` or ``messages``, and whatever a reward reads. With
    ``NLL()`` they are what a model is to imitate, and with ``preference_loss(…)`` what is compared, encoded for the
    model. ``model`` alone checks that the model can read each prompt, with ``new_tokens`` behind it. ``seed``: of the
    order. Rows with more than ``max_length`` tokens are left out; without ``apply_chat_template`` the contents of
    messages are read as they are.

    Keys of rows and messages that other libraries read and nothing here are named once: columns here, and keys for the
    chat template where rows meet a model, here or at the first ``rollout.generate`` or ``policy.update``.

    A loss of rewards gives the model's tokenizer a pad token with which no row ends, before a ``RewardModel`` is made.

    >>> from rl_bridge import load_rows
    >>> rows = load_rows("problems.jsonl", seed=1)  # doctest: +SKIP
    >>> rows.take(1)  # doctest: +SKIP
    [{'prompt': '1+1=', 'answer': 2, '_where': 'problems.jsonl, row 1'}]
    >>> def sums():
    ...     yield from ({"prompt": f"{n}+1=", "answer": n + 1} for n in range(9))
    >>> load_rows(sums).take(9)[0]["_where"].startswith("sums, row ")
    True

    Raises:
        TypeError: an argument of another kind; or a reader that takes other arguments, or gives no rows.
        FileNotFoundError: no such file.
        ValueError: rows that cannot be read: the first few with file or function, row number, field and what was
            expected; a loss without a model; or an argument that has no effect.
    """
    data = os.fspath(data) if isinstance(data, os.PathLike) else data
    require_kind("data", data, (str, Callable, Iterable), "a file, a folder, a hub data set, a reader or rows")
    require_kind("model", model, (Model, NoneType), "one of load_model(…)")
    require_kind("loss", loss, (NLL, ComparisonLoss, NoneType), 'NLL() or preference_loss("dpo"), none for prompts')
    check_call(load_rows, locals())
    census, reader = SourceCensus(), reader_fingerprint(data)  # before a call, which may change it
    if loss is None:
        encoding = {"max_length": max_length, "apply_chat_template": apply_chat_template}
        require_default(encoding, (None, True), "on rows without a loss, which are prompts")
    if loss is not None or model is None:
        require_default({"new_tokens": new_tokens}, (0,), "but on prompts for a model")
    if loss is None:
        rows = read_rows(data, check=policy_row, census=census)
        census.trained = len(rows)
        if model is not None:
            check_rows(model.source, model.tokenizer, rows, prompted(model.tokenizer), new_tokens=new_tokens)
            remark_on_prompts(model.tokenizer, rows, model.keys_met("prompts"))
        return Rows(rows, seed=seed, reader=reader, census=census)
    if model is None:
        raise ValueError(f"rows for {loss} are encoded for a model: load_rows(data, model, loss)")
    source, tokenizer = model.source, model.tokenizer
    reading: dict[str, Any] = {"apply_chat_template": apply_chat_template, "max_length": max_length}
    if isinstance(loss, NLL):
        rows = read_rows(data, fields=(), check=supervised_row, census=census)
        memory = model.keys_met("imitated") if apply_chat_template else None
        remark_on_conversations(tokenizer, rows, memory, apply_chat_template=apply_chat_template)
        trajectories, left_out = encoded(source, tokenizer, rows, **reading)
        _count(census, len(trajectories), left_out, max_length)
        return rows_for_loss(model, trajectories, seed=seed, reader=reader, census=census, fingerprint=of_rows(rows))
    compared = read_comparisons(data, census)
    remark_on_unread(tokenizer, compared, apply_chat_template)
    examples = encoded_comparisons(source, tokenizer, compared, loss, **reading)
    _count(census, rows_in(examples), len(compared) - rows_in(examples), max_length)
    if loss.name in REWARD_LOSSES:
        templated = apply_chat_template and any(map(has_roles, compared))
        pad_of_rewards(source, tokenizer, examples, templated=templated)
    fingerprint = of_rows([{**vars(row), "where": ""} for row in compared])
    return rows_for_loss(model, examples, seed=seed, reader=reader, census=census, fingerprint=fingerprint)


def rows_for_loss(model: Model, encoded_rows: Sequence[Trajectory] | Sequence[Example], **options: Any) -> Rows:
    """Rows that were encoded for a model and a loss; ``options`` are those of ``Rows``."""
    batch: Callable[..., TokenBatch | PairBatch] = batch_of if isinstance(encoded_rows[0], Example) else collate
    return Rows(encoded_rows, collate=lambda part: marked(batch(part, model.pad_token), model.tokenizer), **options)


def _count(census: SourceCensus, trained: int, left_out: int, max_length: int | None) -> None:
    """Count the rows to train on and those that are left out for their length."""
    census.trained = trained
    census.leave_out(f"they have more than {max_length} tokens (max_length)", left_out)
