import json
import re

import pytest

from rl_bridge.data.rows import policy_row, read_rows, supervised_row
from rl_bridge.models.encoding import conversation_of

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
        ({"prompt": "a", "text": "b"}, "a row with 'prompt' needs one of 'response', 'completion', 'answer'; it has"),
        ({"prompt": "2+2?", "messages": [USER, REPLY]}, "the messages do not hold the prompt; give one"),
        ({"prompt": "1+1?", "messages": [USER]}, "messages has none of the assistant, so there is nothing to learn"),
        ({"messages": [USER]}, "messages has none of the assistant, so there is nothing to learn; its roles are ['us"),
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


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "2"}, "field 'prompt' is missing or empty; the row has ['answer']"),
        ({"messages": [USER, REPLY]}, "messages ends with the assistant's, so there is nothing to sample"),
        ({"messages": []}, "field 'prompt' is missing or empty"),
        ({"prompt": [True]}, "prompt must be text or messages with role and content, got [True]"),
    ],
)
def test_what_is_wrong_with_a_row_to_sample_from(row, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        policy_row(row)


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
    (row,) = read_rows(str(tmp_path / "rows.csv"), fields=())
    assert {name: row[name] for name in columns} == columns
    assert row["answer"] == "[{}]"  # JSON, and no messages


@pytest.mark.parametrize("check", [policy_row, supervised_row])
def test_tools_are_schemas_or_their_json(check):
    tools, row = [{"type": "function", "function": {"name": "add"}}], {"prompt": [USER], "answer": "2"}
    assert check(row | {"tools": json.dumps(tools)})["tools"] == check(row | {"tools": tools})["tools"] == tools
    assert check(row | {"tools": None})["tools"] is None
    for bad in ("add", '"add"', ["add"], {"type": "function"}):
        with pytest.raises(ValueError, match="tools must be a list of JSON schemas"):
            check(row | {"tools": bad})
