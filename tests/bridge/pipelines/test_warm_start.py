"""A warm start imitates one response of a row, read as supervision reads it; two that differ are refused or named."""

import json
from dataclasses import replace

import pytest

from rl_bridge.common.terminal import remarks
from rl_bridge.data.rows import policy_row
from rl_bridge.loop.data import Model
from rl_bridge.loop.trained import Policy
from rl_bridge.models.row_checks import imitated_rows
from rl_bridge.models.small import TinySource
from rl_bridge.rewards import exact_match
from rl_train import policy_inputs
from rl_train.policy import run_policy
from rl_train.policy_configs import quickstart
from rl_train.policy_inputs import PolicyInputs, inputs_of
from rl_train.policy_options import WarmStart
from tests.support.chat_templates import bytes_tokenizer

ASK, SAYS, ANSWERS = (
    {"role": role, "content": words} for role, words in (("user", "1+1?"), ("assistant", "It is 2"), ("assistant", "2"))
)
TWO = "messages and answer both hold what the assistant is to say, and differ; give one of them"
BESIDE = "the warm start imitates `{}` and not `{}`, which says something else: 1 of 2 rows have both, first {}, row 2"
PLAIN = {"prompt": [ASK], "answer": "2"}
# Row → what is refused, or what is named.
ROWS = {
    "an answer": (PLAIN, None, None),
    "messages and no prompt": ({"messages": [ASK], "answer": "2"}, None, None),
    "messages that end with the answer": (PLAIN | {"messages": [ASK, ANSWERS]}, None, None),
    "messages that end with something else": (PLAIN | {"messages": [ASK, SAYS]}, TWO, None),
    "messages behind a text": ({"prompt": "1+1?", "messages": [ASK, SAYS], "answer": "2"}, TWO, None),
    "the same in a response": (PLAIN | {"response": "2"}, None, None),
    "a response": (PLAIN | {"response": "It is 2"}, None, ("response", "answer")),
    "a response in roles": (PLAIN | {"response": [SAYS]}, None, ("response", "answer")),
    "a completion": (PLAIN | {"completion": "It is 2"}, None, ("completion", "answer")),
}


@pytest.fixture
def tokenizer():
    made = bytes_tokenizer("chatml")
    made.pad_token = "<|im_start|>"
    return made


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("case", ROWS)
def test_a_row_with_two_responses_that_differ_is_refused_or_named(case, steps, tmp_path, monkeypatch, tokenizer):
    row, refused, beside = ROWS[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (PLAIN, row)))
    source = TinySource.for_tokenizer(tokenizer, hidden=16, layers=1, heads=2)
    monkeypatch.setattr(policy_inputs, "load_model", lambda *_: (source, tokenizer))
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "2+2=", "answer": "4"}))
    warm = WarmStart(steps=steps, rows_per_step=1)
    data = {"data": "rows.jsonl", "eval_data": "held.jsonl", "model": "there"}
    pipeline = replace(quickstart(), sft=warm, **data)
    remarks()
    if refused and steps:
        with pytest.raises(ValueError, match=f"rows.jsonl, row 2: {refused}"):
            inputs_of(pipeline)
        return
    inputs_of(pipeline)
    named = [line for line in remarks() if "imitates" in line]
    assert named == ([BESIDE.format(*beside, "rows.jsonl")] if beside and steps else [])


@pytest.mark.parametrize("other", ["response", "completion", "answer"])
def test_the_field_that_is_imitated_is_named(other):
    """Messages that end with the assistant's are imitated, whatever stands beside them."""
    rows = [{"messages": [ASK, ANSWERS], other: "2"}, {"messages": [ASK, SAYS], other: "2", "_where": "rows, row 2"}]
    remarks()
    assert [row["messages"][-1] for row in imitated_rows(rows)] == [ANSWERS, SAYS]
    assert remarks() == [BESIDE.format("messages", other, "rows")]


def test_a_label_that_the_warm_start_does_not_read_is_named():
    """As in supervised fine-tuning: a completion that was marked as bad is imitated all the same."""
    rows = [{"prompt": "1+1=", "answer": "2", "label": False}, {"prompt": "1+2=", "answer": "3"}]
    remarks()
    assert len(imitated_rows(rows)) == 2
    assert remarks() == ["row key `label` is not read by the warm start: 1 of 2 rows have it, first row 1"]


def test_the_warm_start_reads_responses_as_supervision_does(monkeypatch, tmp_path, tokenizer):
    update, batches = Policy.update, []

    def ending(policy, rows):
        batches.append(update(policy, rows).batch)
        raise KeyboardInterrupt

    monkeypatch.setattr(Policy, "update", ending)
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "2"}]
    said = [SAYS | {"content": "wrong", "weight": 0}, ASK, SAYS | {"content": parts}]
    row = policy_row({"prompt": [ASK], "response": said, "answer": "2"})
    pipeline = replace(quickstart(), output=tmp_path, sft=WarmStart(steps=1, rows_per_step=1))
    model = Model(TinySource.for_tokenizer(tokenizer, hidden=16, layers=1, heads=2), tokenizer)
    with pytest.raises(KeyboardInterrupt):
        run_policy(pipeline, read=lambda options: PolicyInputs.of(options, model, [row] * 64, [row], exact_match))
    assert tokenizer.decode(batches[0].tokens[batches[0].mask]) == "It is 2<|im_end|>"
