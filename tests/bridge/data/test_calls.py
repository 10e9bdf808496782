"""Calls and tools in the spellings that files and programs have for them: one form, or a refusal by name."""

import json

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rl_bridge.common.terminal import remarks
from rl_bridge.data.messages import OTHER_CALLS, tools_of
from rl_bridge.data.rows import policy_row, read_rows, supervised_row
from rl_bridge.loop.data import any_row
from rl_bridge.models.encoding import encode_row
from tests.support.chat_templates import CHATML, KINDS, bytes_tokenizer

ASK, SAYS = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
ASKS_FOR_KEY = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% if m.tool_calls is defined %}<call>{{ m.tool_calls[0].function.name }}{% endif %}",
    1,
)
NO_CALLS = {"a list": [], "text": "[]", "null": None, "text of null": "null", "no text": " ", "an array": np.array([])}


@pytest.mark.parametrize("form", NO_CALLS)
@pytest.mark.parametrize("kind", [*KINDS, "asks for the key"])
def test_no_calls_are_no_key(form, kind):
    tokenizer = bytes_tokenizer("chatml" if kind == "asks for the key" else kind)
    if kind == "asks for the key":
        tokenizer.chat_template = ASKS_FOR_KEY
    empty = [message | {"tool_calls": NO_CALLS[form]} for message in (ASK, SAYS)]
    row, plain = (supervised_row({"messages": messages}) for messages in (empty, [ASK, SAYS]))
    assert row == plain and policy_row({"prompt": [*empty, ASK]})["prompt"] == [ASK, SAYS, ASK]
    trained = [outcome(lambda row=row: encode_row(tokenizer, row)) for row in (row, plain)]
    assert trained[0] == trained[1]


def outcome(encode):
    """The tokens and what counts of these, or the words of a refusal."""
    try:
        encoded = encode()
    except ValueError as error:
        return str(error)
    return encoded if isinstance(encoded, list) else (encoded.tokens, encoded.loss_mask)


def calling(call):
    return {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]}


def read_call(call):
    return supervised_row(calling(call))["messages"][1]["tool_calls"][0]


ARGUMENTS = {"an object": {"a": 1}, "JSON": '{"a": 1}', "JSON behind a space": ' {"a": 1}\n'}
NONE = {"absent": {}, "null": {"arguments": None}, "text of null": {"arguments": "null"}, "no text": {"arguments": ""}}


@pytest.mark.parametrize("flat", [True, False])
def test_arguments_are_an_object_in_every_spelling(flat):
    def call(**own):
        return {"name": "f", **own} if flat else {"type": "function", "function": {"name": "f", **own}}

    for spelled in ARGUMENTS.values():
        assert read_call(call(arguments=spelled)) == call(arguments={"a": 1})
    for own in NONE.values():
        assert read_call(call(**own)) == call(arguments={})
    function = {"name": "f", "arguments": {"a": 1}}
    assert read_call({"function": json.dumps(function)}) == {"function": function}
    assert read_call(call(arguments=[])) == call(arguments={})  # as PHP writes an object without names
    others = {"id": "1", "index": 0, "status": "done", "extra_content": {"signature": "x"}, "result": '{"time": 12}'}
    others |= {"cache_control": {"type": "ephemeral"}, "output": {"a": 1}, "note": {"a": 1}}
    assert read_call(call(arguments="{}") | others) == call(arguments={}) | others


BAD_CALLS = {
    "a list": ({"name": "f", "arguments": [["a", 1]]}, "arguments must be an object or its JSON text"),
    "a number": ({"name": "f", "arguments": 5}, "arguments must be an object or its JSON text"),
    "a truth": ({"name": "f", "arguments": True}, "arguments must be an object or its JSON text"),
    "JSON of a list": ({"name": "f", "arguments": "[1]"}, "arguments must be an object or its JSON text"),
    "no JSON": ({"name": "f", "arguments": "a=1"}, "arguments must be an object or its JSON text"),
    "parameters": ({"name": "f", "parameters": {"a": 1}}, "beside its name, not 'parameters'"),
    "input": ({"function": {"name": "f", "input": {"a": 1}}}, "beside its name, not 'input'"),
    "tool_input": ({"name": "f", "tool_input": {"a": 1}}, "stand under 'arguments' beside its name, not 'tool_input'"),
    "an object of no name": ({"name": "f", "payload": '{"a": 1}'}, "beside its name, not 'payload'"),
    "beside the function": ({"function": {"name": "f"}, "arguments": {"a": 1}}, "beside its name, not 'arguments'"),
    "text beside it": ({"function": {"name": "f"}, "input": "x"}, "beside its name, not 'input'"),
    "text beside the function": ({"function": {"name": "f"}, "arguments": "Oslo"}, "beside its name, not 'arguments'"),
    "a list beside the function": ({"function": {"name": "f"}, "arguments": ["x"]}, "beside its name, not 'arguments'"),
    "two kinds": ({"name": "f", "arguments": {}, "parameters": {"a": 1}}, "beside its name, not 'parameters'"),
    "no name": ({"arguments": {"a": 1}}, "a call has the name of its tool"),
    "a name that is none": ({"function": {"name": 3}}, "a call has the name of its tool"),
    "another type of call": ({"type": "custom", "custom": {"name": "f", "input": "x"}}, "the name of its tool"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_call_in_another_form_is_refused_with_its_place(case):
    call, words = BAD_CALLS[case]
    with pytest.raises(ValueError, match=rf"messages\[1\]\.tool_calls\[0\].*: .*{words}"):
        supervised_row(calling(call))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOLS = {
    "objects": {"type": "function", "function": FUNCTION},
    "parameters as text": {"type": "function", "function": FUNCTION | {"parameters": json.dumps(SCHEMA)}},
    "properties as text, of another type": {
        "function": FUNCTION | {"parameters": {"type": "dict", "properties": json.dumps(SCHEMA["properties"])}}
    },
    "properties as text, of no type": {
        "function": FUNCTION | {"parameters": {"properties": json.dumps(SCHEMA["properties"])}}
    },
    "the function as text": {"type": "function", "function": json.dumps(FUNCTION)},
    "properties as text": {
        "type": "function",
        "function": FUNCTION | {"parameters": SCHEMA | {"properties": json.dumps(SCHEMA["properties"])}},
    },
}


@pytest.mark.parametrize(
    "flat, form", [(flat, form) for flat in (True, False) for form in TOOLS if form[:3] != "the" or not flat]
)
def test_a_schema_is_an_object_in_every_spelling(form, flat):
    tool, plain = (TOOLS[name]["function"] if flat else TOOLS[name] for name in (form, "objects"))
    read = tools_of({"tools": [tool]})
    assert read == tools_of({"tools": json.dumps([tool])})
    if "of " not in form:
        assert read == (plain,)
    function = read[0] if flat else read[0]["function"]
    assert function["parameters"]["properties"] == SCHEMA["properties"]


NAMED_SO = {"type": "object", "properties": {"function": {"type": "string"}, "parameters": {}, "properties": {}}}
FLAT = {"city": "string", "function": "string", "properties": "list of str"}
AS_THEY_ARE = [
    *({"name": "f"}, {"name": "f", "parameters": {}}, {"type": "web_search"}),
    *({"name": "f", "parameters": NAMED_SO}, {"name": "f", "parameters": FLAT}, {"name": "f", "inputSchema": SCHEMA}),
]


@pytest.mark.parametrize("tool", AS_THEY_ARE, ids=str)
def test_a_schema_of_names_and_objects_stays_as_it_is(tool):
    assert tools_of({"tools": [tool, {"function": tool}]}) == (tool, {"function": tool})
    for nothing in ([], ""):
        assert tools_of({"tools": [{"name": "f", "parameters": nothing}]}) == ({"name": "f", "parameters": {}},)


# What a table adds to a schema that it writes as JSON: the keys of the other schemas.
ADDED = {
    "no parameters": ({"name": "f", "parameters": None}, {"name": "f"}),
    "no list": ({"parameters": {"required": None, "properties": {}}}, {"parameters": {"properties": {}}}),
    "another's property": ({"parameters": {"properties": {"default": None}}}, {"parameters": {"properties": {}}}),
    "a property's key": (
        {"parameters": {"properties": {"x": {"enum": None, "default": None, "const": None}}}},
        {"parameters": {"properties": {"x": {"default": None, "const": None}}}},
    ),
    "in a list": ({"parameters": {"anyOf": [{"enum": ["a", None], "items": None}]}}, {"parameters": {"anyOf": [
        {"enum": ["a", None]}]}}),
}  # fmt: skip


@pytest.mark.parametrize("form", ADDED)
def test_a_schema_has_no_keys_of_other_schemas(form):
    added, own = ADDED[form]
    for wrapped in ([added], json.dumps([added]), [{"function": added}]):
        (tool,) = tools_of({"tools": wrapped})
        assert tool.get("function", tool) == own


@pytest.mark.parametrize("content", ["2", None, ""], ids=str)
@pytest.mark.parametrize(
    "nothing", [{}, [], "", "none", "auto", {"name": None, "arguments": None}, {"name": "", "arguments": ""}], ids=str
)
@pytest.mark.parametrize("key", OTHER_CALLS)
def test_a_call_of_which_all_is_null_is_no_call(key, nothing, content):
    says = SAYS | {"content": content}
    row, plain = ({"messages": [ASK, message]} for message in (says | {key: nothing}, says))
    assert outcome(lambda: supervised_row(row)["messages"]) == outcome(lambda: supervised_row(plain)["messages"])


@pytest.mark.parametrize("written", ["parquet", "jsonl", "in hand"])
def test_a_null_argument_that_a_table_wrote_as_json_is_named(tmp_path, written):
    """A table's structs have the keys of all rows: its own files are read without them, its JSON has them as null."""
    named = (("weather", {"city": "P", "at": {"day": 1}}), ("now", {}), ("then", {"at": {"hour": 2}}))
    functions = [{"function": {"name": name, "arguments": arguments}} for name, arguments in named]
    calling = [[ASK, SAYS | {"content": "", "tool_calls": [function]}] for function in functions]
    table = datasets.Dataset.from_list([{"messages": messages} for messages in calling])
    file = str(tmp_path / f"rows.{written}")
    source = file if written != "in hand" else list(table)
    if written == "jsonl":
        table.to_json(file)
    elif written == "parquet":
        table.to_parquet(file)
    remarks()
    rows = read_rows(source, check=supervised_row, fields=())
    words = " ".join(remarks())
    read = [row["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in rows]
    if written == "parquet":
        assert read[0] == {"city": "P", "at": {"day": 1}} and read[2] == {"at": {"hour": 2}}
        assert read[1] == {} and "null" not in words
    else:
        assert read[1] == {"city": None, "at": None}
        assert words.count("calls of 3 rows have arguments that are null, first hour of") == 1


def test_a_null_argument_of_json_text_is_the_user_s_own():
    remarks()
    call = {"function": {"name": "f", "arguments": '{"city": null}'}}
    read_rows([{"messages": [ASK, SAYS | {"tool_calls": [call]}]}], check=supervised_row, fields=())
    assert "null" not in " ".join(remarks())


@pytest.mark.parametrize("part", ["function", "parameters", "properties"])
@pytest.mark.parametrize("value", [[["a", {}]], 5, "words"], ids=str)
def test_a_schema_of_another_form_is_refused_with_its_place(part, value):
    tool = (
        {"function": value}
        if part == "function"
        else {
            "function": {
                "name": "f",
                "parameters": value if part == "parameters" else {"type": "object", "properties": value},
            }
        }
    )
    with pytest.raises(ValueError, match=rf"tools\[0\].*{part} must be an object or its JSON text, got"):
        policy_row({"prompt": "x", "tools": [tool]})


@pytest.mark.parametrize("kind", [None, "dict", "OBJECT", ["object", "null"]], ids=str)
def test_pairs_are_no_properties_whatever_the_type(kind):
    tool = {"name": "f", "parameters": {"type": kind, "properties": [["a", {}]]}}
    with pytest.raises(ValueError, match=r"tools\[0\]\.parameters\.properties must be an object or its JSON text"):
        tools_of({"tools": [tool]})
    for bad in ({"function": ""}, {"function": []}, {"name": "f", "parameters": False}):
        with pytest.raises(ValueError, match="must be an object or its JSON text"):
            tools_of({"tools": [bad]})


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_table_s_maps_are_objects(suffix, tmp_path):
    text, function = pyarrow.string(), {"name": "f", "arguments": [("city", "Paris")]}
    call = pyarrow.struct({"function": pyarrow.struct({"name": text, "arguments": pyarrow.map_(text, text)})})
    message = pyarrow.struct({"role": text, "content": text, "tool_calls": pyarrow.list_(call)})
    rows = [
        {
            "messages": [
                ASK | {"tool_calls": None},
                {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
            ]
        }
    ]
    table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema({"messages": pyarrow.list_(message)}))
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    (row,) = read_rows(str(path), fields=(), check=supervised_row)
    assert row["messages"][0] == ASK
    assert row["messages"][1]["tool_calls"] == [{"function": {"name": "f", "arguments": {"city": "Paris"}}}]


def test_a_map_that_names_a_key_twice_is_a_list_of_pairs_where_nobody_reads_it_and_named(tmp_path):
    text = pyarrow.string()
    schema = pyarrow.schema({"prompt": text, "of": pyarrow.map_(text, text)})
    table = pyarrow.Table.from_pylist([{"prompt": "x", "of": [("a", "1"), ("a", "2")]}], schema=schema)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    remarks()
    (row,) = read_rows(str(tmp_path / "rows.parquet"))
    assert (row["prompt"], row["of"]) == ("x", [("a", "1"), ("a", "2")])
    assert "maps of the table are lists of pairs, for one has a key twice" in " ".join(remarks())


@pytest.mark.parametrize("key", OTHER_CALLS)
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=str)
def test_a_call_of_another_format_has_no_content_of_its_own(key, content):
    message = {"role": "assistant", key: {"name": "f", "arguments": "{}"}}
    (_, read) = supervised_row({"messages": [ASK, message | content]})["messages"]
    assert read == message | {"content": ""}


def test_arrays_in_hand_are_read_at_every_depth():
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    inside = [messages[0], messages[1] | {"tool_calls": np.array([call], dtype=object)}, messages[2]]
    for prompt in (inside, np.array(messages, dtype=object), np.array(inside, dtype=object)):
        for read in (policy_row, any_row):
            assert read({"prompt": prompt})["prompt"] == messages
