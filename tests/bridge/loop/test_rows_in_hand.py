"""Rows that a program hands to a loop's objects are read as ``load_rows`` reads them, in every spelling."""

import json
from types import SimpleNamespace

import pytest

import rl_fn
from rl_bridge import (
    NLL,
    AdamW,
    Ahead,
    Model,
    Policy,
    Rollout,
    Rows,
    SamplingParams,
    current_executor,
    load_rows,
)
from rl_bridge.common.terminal import remarks
from rl_bridge.loop import trained
from rl_bridge.loop.data import in_hand
from rl_bridge.models.small import TinySource
from tests.support.chat_templates import bytes_tokenizer

SAMPLING = SamplingParams(n=1, max_new_tokens=2, seed=1)
PARTS = [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]
USER, PLAIN = {"role": "user", "content": PARTS}, {"role": "user", "content": "What now?"}
WRONG, RIGHT = {"role": "assistant", "content": "wrong"}, {"role": "assistant", "content": "right"}
CALL = {"role": "assistant", "content": None, "name": None, "tool_calls": [
    {"type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 1})}}
]}  # fmt: skip
PROMPTS = {
    "parts": {"prompt": [USER]},
    "messages": {"messages": [USER], "answer": "2"},
    "a call": {"prompt": [USER, CALL, {"role": "tool", "content": "1"}]},
    "tools as text": {"prompt": [PLAIN], "tools": "[]"},
    "keys that hold nothing": {"prompt": [PLAIN | {"name": None}], "messages": None},
    "text": {"prompt": "What now?", "answer": 2},
}
SUPERVISED = {
    "a weight": {"messages": [PLAIN, WRONG | {"weight": 0}, USER, RIGHT]},
    "a flag": {"messages": [PLAIN, WRONG | {"train": False}, USER, RIGHT]},
    "parts": {"prompt": [USER], "response": [RIGHT | {"content": PARTS}]},
    "a call": {"messages": [USER, CALL | {"weight": 0}, {"role": "tool", "content": "1"}, RIGHT]},
    "an answer": {"prompt": "What now?", "answer": 2},
}


class Opens:
    """An environment that opens with the row's prompt, and ends."""

    def reset(self, row):
        prompt = row["prompt"]
        return (
            [PLAIN | {"content": prompt}]
            if isinstance(prompt, str)
            else [dict(m, content=str(m["content"])) for m in prompt]
        )

    def step(self, messages):
        raise OSError("nothing else")


@pytest.fixture(scope="module")
def model():
    """A tiny model with a chat template; its engines are gone in the end."""
    current_executor().stop()
    tokenizer = bytes_tokenizer("chatml")
    tokenizer.pad_token = "<|im_start|>"
    yield Model(TinySource.for_tokenizer(tokenizer, hidden=16, layers=1, heads=2), tokenizer)
    current_executor().stop()


@pytest.fixture(scope="module")
def rollout(model):
    """One for all tests."""
    return Rollout(model)


def without_place(row):
    return {name: value for name, value in row.items() if name != "_where"}


@pytest.mark.parametrize("spelling", PROMPTS)
def test_prompts_in_hand_are_those_of_load_rows(rollout, spelling):
    row = PROMPTS[spelling]
    (read,) = load_rows([row]).take(1)
    for one_row in (Rows([row]).take(1)[0], rollout.generate([row], SAMPLING).trajectories[0].row):
        assert one_row == without_place(read)
    (drawn,), (expected,) = (rollout.generate([one], SAMPLING).trajectories for one in (row, read))
    assert (drawn.tokens, drawn.messages) == (expected.tokens, expected.messages)


def policy_of(model):
    """As much of a policy as an update of rows to imitate reads."""
    return SimpleNamespace(objective=NLL(), model=model, engine=None, kind="sft", require_encoded=lambda batch: None)


@pytest.mark.parametrize("spelling", SUPERVISED)
def test_rows_to_imitate_in_hand_are_those_of_load_rows(model, spelling, monkeypatch):
    batches = []
    monkeypatch.setattr(trained, "supervised_update", lambda engine, batch: batches.append(batch) or {})
    row, policy = SUPERVISED[spelling], policy_of(model)
    for batch in ([row], Rows([row]).take(1), load_rows([row], model, NLL()).batch(1)):
        Policy.update(policy, batch)
    one, of_rows, expected = (
        (batch.tokens.tolist(), batch.mask.tolist(), model.tokenizer.decode(batch.tokens[batch.mask]))
        for batch in batches
    )
    assert one == of_rows == expected and "wrong" not in expected[2]


def test_an_environment_and_ahead_get_rows_in_one_spelling(model, rollout):
    opened = []

    class Notes(Opens):
        def reset(self, row):
            opened.append(row)
            return super().reset(row)

    rows = [PROMPTS["parts"], PROMPTS["messages"]]
    rollout.converse(rows, SAMPLING, Notes)
    expected = [without_place(row) for row in load_rows(rows).rows]
    assert opened == expected
    policy = Policy(model, rl_fn.recipes.grpo().replace(kl=None), AdamW(1e-3))
    with Ahead(rollout, policy, Rows(rows, seed=3), lambda c, row: 0.0, SAMPLING, prompts=2, steps=1) as ahead:
        policy.engine.sync_weights(rollout.engine)
        groups = ahead.groups()
    assert [t.row for t in groups.trajectories] == Rows(rows, seed=3).take(2)
    policy.release()


def test_rows_that_no_model_reads_are_refused_with_their_number(rollout):
    good = PROMPTS["text"]
    for bad, words in (
        ({"answer": "2"}, "row 2: field 'prompt' is missing"),
        ({"prompt": [WRONG]}, "row 2: prompt ends with the assistant's message"),
        ({"prompt": [{"role": "user"}]}, r"row 2: prompt\[0\] must be a message with role and content"),
    ):
        with pytest.raises(ValueError, match=words):
            rollout.generate([good, bad], SAMPLING)
    with pytest.raises(ValueError, match=r"row 2: prompt\[0\] must be a message"):
        Rows([good, {"prompt": [{"role": "user"}]}])
    with pytest.raises(ValueError, match="row 1: every message of the assistant says that it is not trained on"):
        Policy.update(policy_of(rollout.model), [{"messages": [PLAIN, WRONG | {"weight": 0}]}])
    for rows in (["text"], [good, 3]):
        with pytest.raises(ValueError, match=f"row {len(rows)}: a row is an object with columns, got"):
            rollout.converse(rows, SAMPLING, tools=[add], parse=lambda text: [])
    own = [{"board": [1, 2]}, {"prompt": {"board": 3}}]
    assert sorted(map(str, Rows(own).take(2))) == sorted(map(str, own))  # of an environment alone


# Keys that nothing reads, where rows without a model meet one. A reward reads what it likes of a prompt's columns.
UNREAD_COLUMN = {"loss_mask": [1]}
UNREAD_KEY = {"prompt": [PLAIN | {"name": "Ann"}], "answer": "2"}
NAMED = "message key `name` is not read: it changes no token of {}"
COLUMN = "row key `loss_mask` is not read{}: 1 of 2 rows have it, first row 2"
MAYBE = " (but by a reward or an environment of your own)"
OTHER = "row key `answer` is not read: 1 of 1 rows have it, first row 1"


def met(model, meet, rows):
    """Remarks of rows that meet a model in two steps."""
    model.settled.clear()
    remarks()
    for _ in range(2):
        meet(rows)
    return remarks()


@pytest.fixture
def prompts(model, rollout):
    """Ways of prompts to a model, by name."""
    policy = Policy(model, rl_fn.recipes.grpo().replace(kl=None), AdamW(1e-3))

    def ahead(rows, **options):
        with Ahead(rollout, policy, Rows(rows), lambda c, row: 0.0, SAMPLING, prompts=2, steps=1, **options):
            pass

    tools = {"tools": [add], "parse": lambda text: []}
    yield {
        "generate": lambda rows: rollout.generate(rows, SAMPLING),
        "converse": lambda rows: rollout.converse(rows, SAMPLING, **tools),
        "ahead": ahead,
        "ahead, tools": lambda rows: ahead(rows, **tools),
    }
    policy.release()


def add(a: int, b: int) -> int:
    """The sum of two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


@pytest.mark.parametrize("way", ["generate", "converse", "ahead", "ahead, tools"])
def test_keys_of_prompts_that_nothing_reads_are_named_once_where_rows_meet_a_model(model, prompts, way):
    meet, rows = prompts[way], [PROMPTS["text"], UNREAD_KEY | UNREAD_COLUMN]
    assert met(model, meet, rows) == [COLUMN.format(MAYBE), NAMED.format("1 rows that have it")]
    read = load_rows(rows).take(2)  # columns are named there, as no model reads them
    assert remarks() == [COLUMN.format(MAYBE).replace("row 2", "the rows, row 2")]
    (words,) = met(model, meet, read)
    assert words.startswith(NAMED.format("1 rows that have it, first"))
    assert met(model, meet, [PROMPTS["text"], PROMPTS["parts"]]) == []
    model.settled.clear()
    load_rows(rows, model)
    remarks()
    meet(rows)  # named where they were loaded for this model
    assert NAMED.format("1 rows that have it") not in remarks()


@pytest.mark.parametrize("kind", ["prompts", "imitated"])
def test_keys_are_looked_at_again_where_the_chat_template_is_another(model, kind):
    row = UNREAD_KEY | {"messages": None}
    meet = lambda: load_rows([row], model, NLL() if kind == "imitated" else None)  # noqa: E731
    plain, words = model.tokenizer.chat_template, NAMED.format("1 rows that have it")
    reads = plain.replace("{{ m.content }}", "{{ m.content }}{{ m.name }}")
    model.settled.clear()
    remarks()
    try:
        for template, named in (
            (plain, True),
            (reads, False),
            (plain, False),
            ("{# other #}" + reads, False),
            ("{# other #}" + plain, True),
        ):
            model.tokenizer.chat_template = template
            for again in (False, True):
                meet()
                lines = [line for line in remarks() if line.startswith(words)]
                assert len(lines) == (named and not again)
    finally:
        model.tokenizer.chat_template = plain


def test_keys_of_rows_to_imitate_that_nothing_reads_are_named_once_where_rows_meet_a_model(model, monkeypatch):
    monkeypatch.setattr(trained, "supervised_update", lambda engine, batch: {})
    policy = policy_of(model)
    rows = [PROMPTS["text"], UNREAD_KEY | UNREAD_COLUMN]
    meet = lambda batch: Policy.update(policy, batch)  # noqa: E731
    assert met(model, meet, rows) == [COLUMN.format(""), NAMED.format("1 rows that have it")]
    assert met(model, meet, [{"messages": [PLAIN, RIGHT], "answer": "2"}]) == [OTHER]
    assert met(model, meet, [SUPERVISED["a flag"]]) == []
    assert met(model, lambda batch: meet(Rows(batch, seed=1).take(2)), rows)[1:] == [
        NAMED.format("1 rows that have it")
    ]


DROPS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and '</think>' in m['content'] %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize("at_a_time", [1, 3])
@pytest.mark.parametrize("loaded", [False, True])
def test_words_that_a_template_leaves_out_of_rows_in_hand_are_named_once(at_a_time, loaded, tmp_path):
    """As those of a file are: an example in a prompt whose thoughts the model would not read."""
    tokenizer = bytes_tokenizer("chatml")
    tokenizer.chat_template, tokenizer.pad_token = DROPS, tokenizer.eos_token
    own = Model(TinySource.for_tokenizer(tokenizer, hidden=16, layers=1, heads=2), tokenizer)
    shown = [{"role": "assistant", "content": "<think>one and one</think>2"}, {"role": "user", "content": "2+2?"}]
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}, *shown]} for n in range(6)]
    remarks()
    if loaded:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        load_rows(str(tmp_path / "rows.jsonl"), own)
    for start in range(0, len(rows), at_a_time):
        in_hand(rows[start : start + at_a_time], model=own)
    named = [line for line in remarks() if "leaves out" in line]
    assert len(named) == 1 and "of what assistant says" in named[0] and "<think>oneandone</think>" in named[0]
