"""One conversation, many spellings: the same tokens and the same mask, whatever file and form it is written in."""

import csv
import itertools
import json

import datasets
import pytest

from rl_bridge.data.comparisons import comparison_of, read_comparisons
from rl_bridge.data.messages import FLAGS, messages_of_field
from rl_bridge.data.rows import policy_row, read_rows, supervised_row
from rl_bridge.models.chat_templates import rendered
from rl_bridge.models.encoding import encode_completion, encode_prompt, encode_row
from tests.support.chat_templates import CHATML, bytes_tokenizer

SHOWN = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
CALL = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} ARGUMENTS</call>{% endfor %}"
# Templates write a call's arguments as JSON, add them to a text, or print them.
WRITTEN = {
    "as JSON": "{{ c.function.arguments | tojson }}",
    "added": "{{ '' + c.function.arguments }}",
    "printed": "{{ c.function.arguments }}",
}
ARGUMENTS = {"city": "Oslo", "days": [1, 2]}
OTHER = {"a": 1, "b": {"x": 2.5}}


def tokenizer_of(written):
    tokenizer = bytes_tokenizer("chatml")
    call = CALL.replace("ARGUMENTS", WRITTEN[written])
    tokenizer.chat_template = SHOWN + CHATML.replace("{{ m.content }}", "{{ m.content }}" + call)
    return tokenizer


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def conversation(name, arguments, *, as_text, empty, parts):
    """A call, its answer and the assistant's last word; ``empty`` is what stands beside the call."""

    def content(text):
        return [{"type": "text", "text": text[:2]}, {"type": "text", "text": text[2:]}] if parts else text

    arguments = json.dumps(arguments) if as_text else arguments
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": content("What?")},
        {"role": "assistant", **empty, "tool_calls": [call]},
        {"role": "tool", "content": content("12 34")},
        {"role": "assistant", "content": content("the answer is 12")},
    ]


def rows_of(**spelling):
    return [
        {"tools": [tool("weather", city={"type": "string"})], "messages": conversation("w", ARGUMENTS, **spelling)},
        {"tools": [tool("add", a={"type": "number"})], "messages": conversation("add", OTHER, **spelling)},
    ]


def write(folder, form, rows):
    """The rows in a file or folder of that form."""
    path = folder / f"rows.{form}"
    if form == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif form == "json":
        path.write_text(json.dumps(rows))
    elif form == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["tools", "messages"])
            writer.writeheader()
            writer.writerows({name: json.dumps(value) for name, value in row.items()} for row in rows)
    elif form == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    elif form == "typed":
        message = {"role": TEXT, "content": TEXT, "tool_calls": datasets.Json()}
        features = datasets.Features({"tools": datasets.Json(), "messages": datasets.List(message)})
        whole = [
            {**row, "messages": [{"content": None, "tool_calls": None, **m} for m in row["messages"]]} for row in rows
        ]
        path = folder / "rows.parquet"
        datasets.Dataset.from_list(whole, features=features).to_parquet(str(path))
    elif form in ("in hand", "reader", "records"):
        table = datasets.Dataset.from_list(rows)
        return {"in hand": table, "reader": lambda: table, "records": table.to_pandas().to_dict("records")}[form]
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return str(path)


FORMS = ("jsonl", "json", "csv", "parquet", "typed", "saved", "in hand", "reader", "records")
TABLES = FORMS[3:]
"""Columns of Arrow, of which each has one type."""
TEXT = datasets.Value("string")
EMPTY = {"empty": {"content": ""}, "null": {"content": None}, "absent": {}}
SPELLINGS = list(itertools.product((False, True), EMPTY, (False, True)))


@pytest.mark.long
def test_spellings_of_a_conversation_are_one_in_every_file(tmp_path):
    tokenizers = {written: tokenizer_of(written) for written in WRITTEN}
    seen, sampled = ({written: set() for written in WRITTEN} for _ in range(2))
    for number, (as_text, empty, parts) in enumerate(SPELLINGS):
        rows = rows_of(as_text=as_text, empty=EMPTY[empty], parts=parts)
        for form in FORMS:
            if parts and (form == "typed" or (form in TABLES and empty != "null")):
                continue  # text, or parts and null
            if form == "records" and not as_text:
                continue  # pandas makes a float of a whole number whose column has a hole
            folder = tmp_path / f"{number}-{form}"
            folder.mkdir()
            read = read_rows(write(folder, form, rows), fields=(), check=supervised_row)
            prompts = read_rows(write(folder, form, [{**row, "messages": row["messages"][:-1]} for row in rows]))
            for written, tokenizer in tokenizers.items():
                encoded = (encode_row(tokenizer, row) for row in read)
                seen[written].add(tuple((t.tokens, t.loss_mask) for t in encoded))
                sampled[written].add(tuple(tuple(encode_prompt(tokenizer, row["prompt"])) for row in prompts))
    for written, tokenizer in tokenizers.items():
        assert len(sampled[written]) == 1, f"{len(sampled[written])} prompts of one conversation"
        assert len(seen[written]) == 1, f"{len(seen[written])} encodings of one conversation"
        ((tokens, mask),) = {row[:1][0] for row in seen[written]}
        said = tokenizer.decode([token for token, counts in zip(tokens, mask, strict=True) if counts])
        arguments = json.dumps(ARGUMENTS)
        assert said == f"<call>w {arguments}</call><|im_end|>the answer is 12<|im_end|>"
        assert '"b"' not in tokenizer.decode(tokens) and "null" not in tokenizer.decode(tokens)


TALK = conversation("w", ARGUMENTS, as_text=False, empty={}, parts=False)
COLUMNS = {
    "messages": {"messages": TALK},
    "prompt, response": {"prompt": TALK[:-1], "response": TALK[-1:]},
    "prompt, completion": {"prompt": TALK[:-1], "completion": TALK[-1:]},
    "prompt, answer": {"prompt": TALK[:-1], "answer": TALK[-1:]},
    "prompt, chosen": {"prompt": TALK[:-1], "chosen": TALK[-1:], "rejected": TALK[1:2]},
    "chosen": {"chosen": TALK, "rejected": [*TALK[:-1], TALK[1]]},
    "prompt, completions": {"prompt": TALK[:-1], "completions": [TALK[-1:], TALK[1:2]]},
}


def text_columns(row, *, one):
    """The row's columns as JSON text; ``one``: of a single message, and not of a list of it."""
    values = {name: value[0] if one and len(value) == 1 else value for name, value in row.items()}
    return {name: json.dumps(value) for name, value in values.items()}


def table_file(folder, form, row):
    """A file of texts."""
    path = folder / f"rows.{form}"
    if form == "jsonl":
        path.write_text(json.dumps(row))
    elif form == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([list(row), list(row.values())])
    else:
        datasets.Dataset.from_list([row]).to_parquet(str(path))
    return str(path)


@pytest.mark.parametrize("columns", COLUMNS)
def test_messages_as_json_text_are_messages_in_every_column_of_every_file(columns, tmp_path):
    tokenizer, row = tokenizer_of("as JSON"), COLUMNS[columns]

    def tokens(source):
        if "chosen" in row or "completions" in row:
            (pair,) = read_comparisons(source)
            return [encode_completion(tokenizer, pair.prompt, completion).tokens for completion in pair.completions]
        (read,) = read_rows(source, fields=(), check=supervised_row)
        return encode_row(tokenizer, read).tokens

    expected = tokens([row])
    for form, one in itertools.product(("jsonl", "csv", "parquet"), (False, True)):
        text = text_columns(row, one=one)
        assert tokens(table_file(tmp_path, form, text)) == tokens([text]) == expected, (form, one)
        if "prompt" in row:
            (sampled,) = read_rows(table_file(tmp_path, form, {"prompt": text["prompt"], "note": text["prompt"]}))
            assert encode_prompt(tokenizer, sampled["prompt"]) == encode_prompt(tokenizer, TALK[:-1])
            assert sampled["note"] == text["prompt"], "a column of the user's own"


@pytest.mark.parametrize(
    "text", ["[1, 2]", "[]", "{}", '{"role": "a"}', '[{"role": "a"}, 3]', '{"role" is', "[[" * 9999]
)
def test_json_of_anything_else_is_a_text(text):
    assert policy_row({"prompt": text})["prompt"] == text
    assert supervised_row({"prompt": "?", "answer": text})["answer"] == text


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("quoted", [str(ARGUMENTS), str(OTHER), json.dumps(ARGUMENTS), "{}", "{'city': 'Oslo'}"])
@pytest.mark.parametrize("arguments", [ARGUMENTS, {"city": "Oslo"}, {}], ids=str)
def test_a_message_that_quotes_a_call_s_arguments_does_not_change_how_they_are_written(written, quoted, arguments):
    tokenizer = tokenizer_of(written)

    def text(content):
        messages = conversation("w", arguments, as_text=False, empty={}, parts=False)
        return rendered(tokenizer, [{"role": "user", "content": content}, *messages], generation_prompt=False)

    assert text(f"call it with {quoted}") == text("?").replace("?", f"call it with {quoted}", 1)


def test_null_that_a_user_wrote_stays(tmp_path):
    call = {"function": {"name": "f", "arguments": {"x": None}}}
    schema = tool("f", x={"enum": ["a", None], "default": None})
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
    (row,) = read_rows(
        write(tmp_path, "jsonl", [{"tools": [schema], "messages": messages}]), fields=(), check=supervised_row
    )
    assert row["tools"] == [schema] and row["messages"][1]["tool_calls"] == [call]


FLAGGED = [{name: value} for name in FLAGS for value in (0, False)] + [{"weight": 0, "loss": False}, {"weight": 0.0}]


@pytest.mark.parametrize("flag", FLAGGED, ids=str)
def test_a_message_that_says_so_is_not_trained_on(flag):
    tokenizer = bytes_tokenizer("chatml")
    said = [("user", "1+1?", {}), ("assistant", "45", flag), ("user", "What", {"loss": False}), ("assistant", "2", {})]
    messages = [{"role": role, "content": content, **keys} for role, content, keys in said]
    for templated in (True, False):
        trajectory = encode_row(tokenizer, supervised_row({"messages": messages}), apply_chat_template=templated)
        pairs = zip(trajectory.tokens, trajectory.loss_mask, strict=True)
        assert tokenizer.decode([token for token, counts in pairs if counts]) == "2<|im_end|>"
        without = supervised_row({"messages": [messages[0], *messages[2:]]})
        plain = encode_row(tokenizer, without, apply_chat_template=templated)
        assert len(plain.tokens) < len(trajectory.tokens), "the turn is read"
    assert "loss" not in rendered(
        tokenizer, supervised_row({"messages": messages})["messages"], generation_prompt=False
    )


@pytest.mark.parametrize("flag", [{"weight": 1}, {"loss": True}, {"train": None}, {"training": 1.0}, {}], ids=str)
def test_a_flag_that_asks_for_training_changes_nothing(flag):
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "2", **flag}]
    assert supervised_row({"messages": messages})["messages"] == [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "2"},
    ]


def test_flags_of_a_pair_decide_the_mask_of_its_completions():
    tokenizer = bytes_tokenizer("chatml")
    prompt = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "45", "weight": 0}]
    prompt = [*prompt, {"role": "user", "content": "What"}]
    row = comparison_of({"prompt": prompt, "chosen": "2", "rejected": "34"})
    for completion, text in zip(row.completions, ("2", "34"), strict=True):
        trajectory = encode_completion(tokenizer, row.prompt, [{"role": "assistant", "content": completion}])
        pairs = zip(trajectory.tokens, trajectory.loss_mask, strict=True)
        assert tokenizer.decode([token for token, counts in pairs if counts]) == f"{text}<|im_end|>"


SAID = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    "message, words",
    [
        ({**SAID, "weight": 0.5}, "weight says whether the message is trained on, 0 or 1, got 0.5"),
        ({**SAID, "loss": "no"}, "loss says whether"),
        ({**SAID, "loss": True, "weight": 0}, "weight and loss contradict each other"),
        ({"role": "user", "content": "a", "train": True}, "what user says is not trained on"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "parts of text, one is .*image_url"),
        ({"role": "user", "content": [3]}, "parts of text, one is 3"),
        ({"role": "user", "content": None}, "content must be text, got None"),
        ({"role": "user"}, "must be a message with role and content"),
        ({"role": "assistant", "tool_calls": "f()"}, "tool_calls must be a list of calls"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}, "must be an object or its JSON"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "must be an object or its",
        ),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_by_place(message, words):
    with pytest.raises(ValueError, match=rf"messages\[1\].*{words}"):
        messages_of_field([{"role": "user", "content": "?"}, message], "messages")


def test_a_row_without_a_message_to_learn_is_refused():
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "2", "weight": 0}]
    with pytest.raises(ValueError, match="every message of the assistant says that it is not trained on"):
        supervised_row({"messages": messages})
    with pytest.raises(ValueError, match="response: every message"):
        supervised_row({"prompt": "?", "response": messages[1:]})
