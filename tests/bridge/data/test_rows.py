import json
import re

import numpy
import pandas
import pytest

from rl_bridge.common.terminal import remarks
from rl_bridge.data.comparisons import comparison_of
from rl_bridge.data.messages import in_one_form, tools_of
from rl_bridge.data.rows import RESPONSES, answered_row, policy_row, read_rows, refuse, supervised_row
from rl_bridge.models.encoding import conversation_of, encode_row
from rl_bridge.rewards.sources import exact_match
from tests.support.chat_templates import bytes_tokenizer

USER, SYSTEM = {"role": "user", "content": "1+1?"}, {"role": "system", "content": "Be brief."}
REPLY, TOOL = {"role": "assistant", "content": "2"}, {"role": "tool", "content": "2"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [SYSTEM, USER, REPLY]},
        {"messages": [REPLY]},
        {"messages": [USER, REPLY], "answer": "2"},
        {"prompt": "1+1?", "response": "2"},
        {"prompt": "1+1?", "completion": 2},
        {"prompt": [USER], "answer": False},
        {"prompt": [USER], "completion": [REPLY, TOOL, REPLY], "source": "x"},
        {"prompt": [3, 4], "response": "2"},
        {"prompt": "1+1?", "prompt_id": "a1", "messages": [USER, REPLY]},
        {"prompt": "1+1?", "messages": [SYSTEM, USER, REPLY, USER, REPLY]},
        {"prompt": [SYSTEM, USER], "messages": [SYSTEM, USER, REPLY], "answer": ""},
    ],
)
def test_supervised_rows_stay_as_they_are(row):
    assert supervised_row(row) == row


@pytest.mark.parametrize("prompt", ["1+1?", [USER]], ids=["text", "messages"])
def test_messages_beside_their_prompt_are_what_is_imitated(prompt):
    row = supervised_row({"prompt": prompt, "messages": [USER, REPLY, TOOL, REPLY]})
    assert conversation_of(row) == ((USER, REPLY, TOOL, REPLY), None)


@pytest.mark.parametrize("prompt", ["1+1?", [USER]], ids=["text", "messages"])
@pytest.mark.parametrize("field", RESPONSES)
@pytest.mark.parametrize(
    ("behind", "response", "agree"),
    [
        ([REPLY], "2", True),
        ([REPLY], 2.0, True),
        ([REPLY], [REPLY], True),
        ([], "3", True),
        ([REPLY], "3", False),
        ([REPLY], [{**REPLY, "content": "3"}], False),
        ([REPLY, USER, REPLY], "2", False),
        ([{**REPLY, "content": "I think so: 2"}], "2", False),
    ],
)
def test_a_row_with_two_targets_is_refused_unless_they_are_one(prompt, field, behind, response, agree):
    row = {"prompt": prompt, "messages": [USER, *behind], field: response}
    if isinstance(prompt, str) and len(behind) == 3:
        row["messages"][2] = {**USER, "content": "And?"}
    if agree:
        assert supervised_row(row)[field] == response
    else:
        with pytest.raises(ValueError, match=f"messages and {field} both hold what the assistant is to say, and diff"):
            supervised_row(row)


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        ({"messages": [USER, REPLY], "answer": "42"}, ["answer"]),
        ({"messages": [USER, REPLY], "answer": 2}, []),
        ({"messages": [USER], "answer": "42"}, []),
        ({"prompt": "1+1?", "response": "It is 2", "answer": "2"}, ["answer"]),
        ({"prompt": "1+1?", "response": "2", "completion": "3", "answer": 2}, ["completion"]),
        ({"prompt": "", "messages": [USER, REPLY], "answer": "42"}, ["answer"]),
        ({"prompt": [USER], "response": [REPLY], "answer": "2"}, []),
    ],
)
def test_a_response_that_is_not_imitated_is_named(row, unread):
    remarks()
    read_rows([row, row], fields=(), check=supervised_row)
    assert [line.split("`")[1] for line in remarks() if "is not read: 2 of 2 rows have it" in line] == unread


FOUR = [4, 4.0, "4", " 4", numpy.int64(4), numpy.float64(4), numpy.float32(4)]


@pytest.mark.parametrize("answer", FOUR, ids=lambda value: f"{type(value).__name__} {value}")
def test_a_whole_number_is_one_text_for_the_reward_and_in_training(answer, tmp_path):
    tokenizer = bytes_tokenizer("chatml")
    (row,) = read_rows([{"prompt": "2+2=", "answer": answer}], check=answered_row)
    assert exact_match("4", row) == exact_match(" 4\n", row) == 1.0 and exact_match("5", row) == 0.0
    for prompt in ("2+2=", [USER]):
        (read,) = read_rows([{"prompt": prompt, "answer": answer}], fields=(), check=supervised_row)
        trained = tokenizer.decode(encode_row(tokenizer, read).tokens)
        assert trained.removesuffix("<|im_end|>").split("=")[-1].split("\n")[-1].strip() == "4"


def test_a_column_of_numbers_with_a_hole_is_read_as_the_numbers(tmp_path):
    table = pandas.DataFrame({"prompt": ["2+2=", "?"], "answer": [4, None]})
    table.to_parquet(tmp_path / "rows.parquet")
    rows = read_rows(str(tmp_path / "rows.parquet"))
    assert exact_match("4", rows[0]) == 1.0
    for bad in (rows[1], *table.to_dict("records")[1:], {"prompt": "?", "answer": float("inf")}):
        with pytest.raises(ValueError, match="answer must be text or a number to be compared"):
            answered_row(bad)
        with pytest.raises(ValueError, match="answer must be text or a number to be compared"):
            exact_match("nan", bad)


def test_an_array_in_a_column_that_nothing_reads_is_named():
    remarks()
    read_rows([{"prompt": "a", "labels": numpy.array([1, 2])}, {"prompt": "a", "labels": numpy.array([])}])
    assert ["`labels`" in line and "1 of 2 rows" in line for line in remarks()] == [True]


def test_messages_that_end_with_the_user_are_the_prompt_of_the_answer():
    row = {"messages": [SYSTEM, USER], "answer": "2"}
    assert supervised_row(row) == {**row, "prompt": [SYSTEM, USER]}


@pytest.mark.parametrize("row", [{"prompt": "1+1?", "level": 3}, {"prompt": [USER], "answer": "2"}, {"prompt": [5]}])
def test_rows_to_sample_from_keep_their_columns(row):
    assert policy_row(row) == row


def test_the_messages_of_a_row_to_sample_from_are_its_prompt():
    row = {"messages": [SYSTEM, USER, REPLY, USER], "answer": "2"}
    assert policy_row(row) == {**row, "prompt": row["messages"]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "expected 'messages', or 'prompt' and a response; the row has ['text']"),
        (
            {"prompt": "a", "text": "b"},
            "a row with 'prompt' needs one of 'response', 'completion', 'answer'; the row has",
        ),
        ({"prompt": "2+2?", "messages": [USER, REPLY]}, "the messages do not hold the prompt; give one"),
        ({"prompt": "1+1?", "messages": [USER]}, "messages has none of the assistant, so there is nothing to learn"),
        ({"messages": [USER]}, "messages has none of the assistant, so there is nothing to learn; its roles are ['us"),
        (
            {"messages": [USER, {**REPLY, "content": ""}]},
            "every message of the assistant in messages is empty: there is",
        ),
        ({"messages": [USER, {**REPLY, "content": ""}, USER, {**REPLY, "content": "", "tool_calls": []}]}, "is empty"),
        (
            {"messages": [{**USER}, {**REPLY, "content": ""}, USER, {**REPLY, "weight": 0}]},
            "is empty: there is nothing",
        ),
        ({"messages": "hello"}, "messages must be a list of messages, got the text 'hello'"),
        ({"messages": {"role": "user"}}, "messages must be a list of messages, got {'role': 'user'}"),
        ({"messages": [USER, "hello"]}, "messages[1] must be a message with role and content, got 'hello'"),
        ({"messages": [{**USER, "role": None}, REPLY]}, "messages[0]: role must be text, got None"),
        ({"messages": [USER, {**REPLY, "content": 2}]}, "messages[1]: content must be text, got 2"),
        ({"messages": [USER, {**REPLY, "content": None}]}, "messages[1]: content must be text, got None"),
        ({"prompt": 3, "response": "a"}, "prompt must be text or messages with role and content, got 3"),
        ({"prompt": "a", "response": {"text": "b"}}, "response must be text or messages, got {'text': 'b'}"),
        ({"prompt": "a", "response": [SYSTEM, REPLY]}, "response holds the assistant's messages, got roles ['system'"),
        ({"prompt": "a", "response": [USER]}, "response has no message of the assistant"),
        ({"prompt": ["a"] * 100, "response": "b"}, "['a', 'a'"),
    ],
)
def test_what_is_wrong_with_a_supervised_row(row, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        supervised_row(row)
    assert len(str(raised.value)) < 300


NOTHING = {"null": None, "empty text": "", "an empty list": []}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
NEEDED = [
    *((supervised_row, {"prompt": "a", name: "b"}, key) for name in RESPONSES for key in ("prompt", name)),
    (supervised_row, {"messages": [USER, REPLY]}, "messages"),
    (policy_row, {"prompt": "a", "level": 3}, "prompt"),
    (policy_row, {"messages": [USER], "level": 3}, "messages"),
    *((comparison_of, PAIR, key) for key in PAIR),
    *((comparison_of, {"prompt": "a", "completion": "b", "label": True}, key) for key in ("completion", "label")),
    (comparison_of, {"prompt": "a", "completions": ["b", "c"]}, "completions"),
]


@pytest.mark.parametrize("words", NOTHING)
@pytest.mark.parametrize(("check", "row", "field"), NEEDED)
def test_a_field_that_is_needed_and_says_nothing_is_named_with_what_it_has(check, row, field, words):
    check(row)
    with pytest.raises(ValueError, match=f"^{field!r} is {words}: "):
        check({**row, field: NOTHING[words]})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "2"}, "field 'prompt' is missing; the row has ['answer']"),
        ({"messages": [USER, REPLY]}, "messages ends with the assistant's, so there is nothing to sample"),
        ({"messages": []}, "'messages' is an empty list"),
        ({"prompt": [True]}, "prompt must be text or messages with role and content, got [True]"),
    ],
)
def test_what_is_wrong_with_a_row_to_sample_from(row, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        policy_row(row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "1+1=", "solution": "2"},
            "field 'prompt' is missing; the row has ['question', 'solution']",
        ),
        ({"prompt;answer": "1+1=;2"}, "field 'prompt' is missing; the row has ['prompt;answer']"),
        ({"prompt": "1+1=", "solution": "2"}, "'exact'), got None; the row has ['prompt', 'solution']"),
        ({"prompt": "1+1=", "answer": ["2"]}, "'exact'), got ['2']; the row has ['answer', 'prompt']"),
    ],
)
def test_a_row_of_other_columns_is_told_of_its_prompt_first_and_of_its_columns(row, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        answered_row(row)


def test_rows_that_a_split_has_shuffled_are_refused_in_the_order_of_each_file():
    places = ["b.jsonl, row 12", "a.jsonl, row 3", "b.jsonl, row 2", "row 9"]
    with pytest.raises(ValueError, match=r"^b.jsonl, row 2: 2; b.jsonl, row 12: 0; a.jsonl, row 3: 1; row 9: 3$"):
        refuse([f"{place}: {number}" for number, place in enumerate(places)], 9)


def test_messages_in_csv_are_json_text(tmp_path):
    text = json.dumps([USER, REPLY]).replace('"', '""')
    (tmp_path / "rows.csv").write_text(f'messages,level\n"{text}",3\n')
    (row,) = read_rows(str(tmp_path / "rows.csv"), fields=(), check=supervised_row)
    assert row["messages"] == [USER, REPLY] and row["level"] == "3"


def test_messages_and_tools_in_csv_are_json_text_in_every_column(tmp_path):
    tools = [{"type": "function", "function": {"name": "add"}}]
    columns = {"prompt": [USER], "chosen": [REPLY], "rejected": [TOOL | {"role": "assistant"}], "tools": tools}
    cells = ['"' + json.dumps(value).replace('"', '""') + '"' for value in columns.values()]
    (tmp_path / "rows.csv").write_text(f"{','.join(columns)},answer\n{','.join(cells)},[{{}}]\n")
    (row,) = read_rows(str(tmp_path / "rows.csv"), fields=(), check=in_one_form)
    assert {name: row[name] for name in columns if name != "tools"} | {"tools": list(tools_of(row))} == columns
    assert row["answer"] == "[{}]"  # JSON, and no messages
    (row,) = read_rows(str(tmp_path / "rows.csv"), fields=())
    assert (row["prompt"], row["tools"], row["chosen"]) == ([USER], tools, json.dumps([REPLY]))


@pytest.mark.parametrize("check", [policy_row, supervised_row])
def test_tools_are_schemas_or_their_json(check):
    tools, row = [{"type": "function", "function": {"name": "add"}}], {"prompt": [USER], "answer": "2"}
    assert check(row | {"tools": json.dumps(tools)})["tools"] == check(row | {"tools": tools})["tools"] == tools
    assert check(row | {"tools": None})["tools"] is None
    for bad in ("add", '"add"', ["add"], {"type": "function"}):
        with pytest.raises(ValueError, match="tools must be a list of JSON schemas"):
            check(row | {"tools": bad})
