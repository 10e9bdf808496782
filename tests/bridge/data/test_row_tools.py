"""Tools and template arguments of a row reach every encoder, in any spelling; keys without effect are named."""

import csv
import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import datasets
import pytest

from rl_bridge.algorithms.ahead_sampler import AheadSampler
from rl_bridge.algorithms.completions import completions
from rl_bridge.common.terminal import remarks
from rl_bridge.data.comparisons import comparison_of, read_comparisons
from rl_bridge.data.messages import OTHER_CALLS, RESERVED, Chat, arguments_of, tools_of
from rl_bridge.data.rows import RowStream, policy_row, read_rows, supervised_row
from rl_bridge.data.trajectory import Request, SamplingParams, requests_of
from rl_bridge.data.unread_keys import MESSAGE_KEYS, ROW_KEYS, TRIES, KeyMemory, remark_on_keys
from rl_bridge.environments.environment import Session
from rl_bridge.environments.factories import Interact
from rl_bridge.loop.encoded import remark_on_unread
from rl_bridge.models.chat_templates import rendered
from rl_bridge.models.encoding import encode_completion, encode_prompt, encode_row
from rl_bridge.models.row_checks import prompted, supervised
from rl_bridge.models.turn_template import TurnTemplate
from rl_bridge.rewards.rewards import _trials
from rl_bridge.rewards.scoring_models import RewardModel, prompt_text
from rl_bridge.rollout.conversations import Conversation, Limits, Opening
from rl_bridge.rollout.decoder import Drawn
from rl_bridge.rollout.rollout_worker import completed
from rl_bridge.rollout.served.openai import OpenAIEndpoint
from tests.support.chat_templates import CHATML, bytes_tokenizer

HEAD = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{{ mood | default('') }}"
CALL = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{% endfor %}{{ m.reasoning_content | default('') }}"
READS_ALL = HEAD + CHATML.replace("{{ m.content }}", "{{ m.content }}" + CALL)
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {name: {"type": "string"}}}},
    }
    for name in ("weather", "add")
]
ARGUMENTS = {"mood": "brief"}
USER = {"role": "user", "content": "What is 1+1?"}
SAYS = {"role": "assistant", "content": "the answer is 2"}
BAD = {"role": "assistant", "content": "45"}
FILES = ("jsonl", "json", "csv", "parquet", "arrow", "saved")


def tokenizer_of(template=READS_ALL):
    tokenizer = bytes_tokenizer("chatml")
    tokenizer.chat_template = template
    return tokenizer


def write(folder, form, rows):
    """The rows in a file or folder of that form."""
    path = folder / f"rows.{form}"
    if form == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif form == "json":
        path.write_text(json.dumps(rows))
    elif form == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            cells = [{k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows]
            writer.writerows(cells)
    elif form == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    elif form == "arrow":
        saved = datasets.Dataset.from_list(rows)
        saved.save_to_disk(str(folder / "of"))
        next((folder / "of").glob("*.arrow")).rename(path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return str(path)


def template_ids(tokenizer, messages, *, tools, arguments, prompt=False):
    """transformers' own tokens of the conversation."""
    ids = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=prompt, return_dict=False, **arguments
    )
    return list(ids)


def sft(tokenizer, source):
    (row, _) = read_rows(source, fields=(), check=supervised_row)
    return encode_row(tokenizer, row), supervised(tokenizer)(row)[1]


def turn_of(tokenizer, text):
    """A turn that the policy drew."""
    tokens = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    return Drawn(None, tokens, [0.0] * len(tokens), None, "stop")


class Engine:
    """Draws nothing: the tokens of the prompts are the result."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def generate(self, prompts, sampling):
        drawn = Drawn(None, [1], [0.0], None, "stop")
        return [
            completed(self._tokenizer, r, 0, prompt=encode_prompt(self._tokenizer, r.prompt), drawn=drawn, version=0)
            for r in requests_of(prompts, 0)
        ]


def prompt_tokens(tokenizer, row):
    """Command or part of one → the tokens of the row's prompt."""
    (trajectory,) = completions(Engine(tokenizer))([row], SamplingParams(max_new_tokens=1))
    assert trajectory.tools == tuple(tools_of(row))
    ahead = SimpleNamespace(_places={}, _skips={}, stream=RowStream([row], 0), _samples=1, _talking=None)
    ahead._tokenizer = tokenizer
    ahead._id = lambda number: (number,)
    session = Session(lambda: Interact(lambda messages: []))
    talk = Conversation(Opening(request_id=(0,), seed=0, row=row))
    limits = Limits(max_turns=2, turn_tokens=8)
    talk.heard(session.reset(row), TurnTemplate(tokenizer), limits, session.tools)
    return {
        "check": prompted(tokenizer)(row)[1],
        "rollout": list(trajectory.prompt_tokens),
        "ahead": AheadSampler._prompt(ahead, 0)[0].tokens,
        "environment": talk.tokens,
        "trial": list(_trials(row, tokenizer, conversations=False)[0].prompt_tokens),
    }


SPELLINGS = [(form, text) for form in FILES for text in (False, True)]


@pytest.mark.parametrize("form, as_text", SPELLINGS)
@pytest.mark.parametrize("beside", [{}, {"chat_template_kwargs": ARGUMENTS}], ids=["tools", "with arguments"])
def test_tools_reach_every_command_in_every_spelling(form, as_text, beside, tmp_path):
    tokenizer = tokenizer_of()
    expected = {"tools": TOOLS, "arguments": beside.get("chat_template_kwargs", {})}
    row = {"tools": TOOLS, **beside}
    row = {name: json.dumps(value) if as_text else value for name, value in row.items()}
    other = {**row, "tools": json.dumps(TOOLS[:1]) if as_text else TOOLS[:1]}

    def source(name, **columns):
        folder = tmp_path / name
        folder.mkdir()
        return write(folder, form, [{**row, **columns}, {**other, **columns}])

    whole = template_ids(tokenizer, [USER, SAYS], **expected)
    drawn = whole[:-1]  # what follows the end of the turn is not drawn
    opening = template_ids(tokenizer, [USER], prompt=True, **expected)
    mask = [place >= len(opening) for place in range(len(drawn))]
    imitated = [
        *sft(tokenizer, source("messages", messages=[USER, SAYS]))[:1],
        *sft(tokenizer, source("answered", prompt=[USER], answer=SAYS["content"]))[:1],
        *sft(tokenizer, source("response", prompt=[USER], response=[SAYS]))[:1],
    ]
    pairs = {
        "prompt": {"prompt": [USER], "chosen": [SAYS], "rejected": [BAD]},
        "texts": {"prompt": [USER], "chosen": SAYS["content"], "rejected": BAD["content"]},
        "whole": {"chosen": [USER, SAYS], "rejected": [USER, BAD]},
        "single": {"prompt": [USER], "completion": [SAYS], "label": 1},
        "ranked": {"prompt": [USER], "completions": [[SAYS], [BAD]]},
        "text prompt": {"prompt": USER["content"], "chosen": [SAYS], "rejected": [BAD]},
    }
    for name, columns in pairs.items():
        if form == "csv" and name == "ranked":
            continue  # a list of lists of messages is text there
        (compared, _) = read_comparisons(source(name, **columns))
        imitated.append(encode_completion(tokenizer, compared.prompt, compared.completions[0]))
        rewarded = encode_completion(tokenizer, compared.prompt, compared.completions[0], to_end=True)
        assert list(rewarded.tokens) == whole, name
    for trajectory in imitated:
        assert list(trajectory.tokens) == drawn and list(trajectory.loss_mask) == mask
        assert trajectory.tools == tuple(TOOLS)
    for columns in ({"prompt": [USER]}, {"messages": [USER]}):
        (sampled, last) = read_rows(source(next(iter(columns)) + " sampled", **columns))
        for command, tokens in prompt_tokens(tokenizer, sampled).items():
            assert tokens == opening, command
        assert prompt_tokens(tokenizer, last)["rollout"] != opening


@pytest.mark.parametrize("arguments", [{}, ARGUMENTS])
def test_tools_reach_a_reward_model_a_judge_and_an_endpoint(arguments):
    tokenizer = tokenizer_of()
    row = policy_row({"prompt": [USER], "tools": TOOLS, "chat_template_kwargs": arguments})
    chat = Chat.of(row)
    request = Request(chat, (0,))
    drawn = turn_of(tokenizer, "12")
    trajectory = completed(tokenizer, request, 0, prompt=encode_prompt(tokenizer, chat), drawn=drawn, version=0)
    model = object.__new__(RewardModel)
    fits = SimpleNamespace(require_tokens=lambda _: None)
    model.__dict__ |= {"_tokenizer": tokenizer, "name": "m", "_fits": fits, "_keys": KeyMemory()}
    encoded = model._encoded(replace(trajectory, row=row), 0)
    said = [USER, {"role": "assistant", "content": "12"}]
    assert list(encoded.tokens) == template_ids(tokenizer, said, tools=TOOLS, arguments=arguments)
    assert prompt_text(trajectory) == f"tools: {json.dumps(TOOLS)}\nuser: {USER['content']}\n"
    endpoint = OpenAIEndpoint(url="http://x", model="m")
    payload = endpoint._request(chat, SamplingParams(max_new_tokens=1), 0)
    assert payload["messages"] == [USER] and payload["tools"] == TOOLS
    assert payload.get("chat_template_kwargs", {}) == arguments
    with pytest.raises(ValueError, match="use api='chat'"):
        OpenAIEndpoint(url="http://x", model="m", api="completions")._request(chat, SamplingParams(max_new_tokens=1), 0)


def test_a_call_of_an_earlier_turn_is_in_the_judge_s_text():
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    (trial, *_) = _trials({"prompt": messages, "answer": "2"}, tokenizer_of(), conversations=False)
    assert prompt_text(trial) == f"user: {USER['content']}\nassistant: {json.dumps([call])}\ntool: 2\n"


class Bare:
    def reset(self, row):
        return [USER]


class Equipped(Bare):
    tools = TOOLS[1:]


class Disarmed(Bare):
    tools = ()


@pytest.mark.parametrize("environment, tools", [(Bare, TOOLS), (Equipped, TOOLS[1:]), (Disarmed, [])])
def test_an_environment_s_own_tools_take_the_place_of_the_row_s(environment, tools):
    tokenizer, session, row = tokenizer_of(), Session(environment), {"tools": TOOLS, "chat_template_kwargs": ARGUMENTS}
    talk = Conversation(Opening(request_id=(0,), seed=0, row=row))
    template, limits = TurnTemplate(tokenizer), Limits(max_turns=2, turn_tokens=8)
    talk.heard(session.reset(row), template, limits, session.tools)
    assert talk.tokens == template_ids(tokenizer, [USER], tools=tools or None, arguments=ARGUMENTS, prompt=True)
    talk.spoke(turn_of(tokenizer, "12"), 0, template)
    talk.heard(SimpleNamespace(messages=[USER], reward=None, done=False, state_id=None), template, limits, tools)
    said = [USER, {"role": "assistant", "content": "12"}, USER]
    assert talk.tokens == template_ids(tokenizer, said, tools=tools or None, arguments=ARGUMENTS, prompt=True)
    assert talk.trajectory("stop", 0).tools == tuple(tools)


@pytest.mark.parametrize("check", [supervised_row, policy_row], ids=["supervised", "policy"])
@pytest.mark.parametrize(
    "columns, words",
    [
        ({"tools": "add"}, "tools must be a list of JSON schemas, got 'add'"),
        ({"tools": ["add"]}, "tools must be a list of JSON schemas"),
        ({"tools": {"name": "add"}}, "tools must be a list of JSON schemas"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs must be an object, got 'x'"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object"),
        *(({"chat_template_kwargs": {name: 1}}, f"holds {name}, which is no variable") for name in RESERVED),
    ],
)
def test_what_is_neither_tools_nor_arguments_is_refused(check, columns, words, tmp_path):
    text = {"prompt": [USER], "answer": "2", **columns}
    (tmp_path / "rows.jsonl").write_text(json.dumps(text))
    with pytest.raises(ValueError, match=words):
        read_rows(str(tmp_path / "rows.jsonl"), check=check)
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": [USER], "chosen": "2", "rejected": "3", **columns}))
    with pytest.raises(ValueError, match=words):
        read_comparisons(str(tmp_path / "pairs.jsonl"))


def test_nothing_beside_the_messages_leaves_the_prompt_as_it_is():
    for row in ({"prompt": [USER]}, {"prompt": [USER], "tools": [], "chat_template_kwargs": None}):
        assert Chat.of(row).shortest == [USER]
    assert tools_of({"tools": " "}) == () and arguments_of({}) == {}


# Keys that nothing reads are named.


@pytest.fixture(autouse=True)
def no_remarks():
    remarks()
    yield
    remarks()


FORMS = {
    "supervised": {"messages": [USER, SAYS]},
    "policy": {"prompt": [USER], "answer": "2"},
    "pair": {"prompt": [USER], "chosen": "2", "rejected": "3"},
}


def read(form, source):
    if form == "pair":
        return read_comparisons(source)
    return read_rows(source, fields=(), check=supervised_row if form == "supervised" else policy_row)


@pytest.mark.parametrize("form", FORMS)
def test_each_column_that_nothing_reads_is_named_once(form, tmp_path):
    values = itertools.cycle([[0, 1], 0.5, "x", False])
    rows = [{**FORMS[form], **{name: next(values) for name in ROW_KEYS}}, FORMS[form]]
    read(form, write(tmp_path, "jsonl", rows))
    lines = remarks()
    for name in ROW_KEYS:
        (line,) = [line for line in lines if f"row key `{name}` is not read" in line]
        assert line.endswith("1 of 2 rows have it, first " + str(tmp_path / "rows.jsonl") + ", row 1")
        assert ("but by a reward or an environment" in line) == (form == "policy")


@pytest.mark.parametrize("form", FORMS)
def test_a_column_of_the_user_s_own_is_not_named(form, tmp_path):
    read(form, write(tmp_path, "jsonl", [{**FORMS[form], "difficulty": 3, "system": None, "images": []}]))
    assert remarks() == []


def test_a_label_is_named_where_it_is_not_read(tmp_path):
    row = {"prompt": "1+1=", "completion": "3", "label": 0}
    source = write(tmp_path, "jsonl", [row, {**row, "completion": "2", "label": True}])
    read("pair", source)
    assert remarks() == []
    read("supervised", source)
    assert [line[:26] for line in remarks()] == ["row key `label` is not rea"]


def named(tokenizer, form, row, **options):
    """The names of the keys that are named for the row in this form."""
    if form == "pair":
        remark_on_unread(tokenizer, [comparison_of(row)], options.get("apply_chat_template", True))
    elif form == "supervised":
        remark_on_keys([supervised_row(row)], lambda r: encode_row(tokenizer, r, **options).tokens)
    else:
        remark_on_keys([policy_row(row)], lambda r: encode_prompt(tokenizer, Chat.of(r), **options))
    return sorted(line.split("`")[1] for line in remarks())


def with_key(form, name):
    """The form's row, with the key in each message."""
    return {
        field: [{**message, name: "x"} for message in value] if isinstance(value, list) else value
        for field, value in FORMS[form].items()
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [name for name in MESSAGE_KEYS if name != "tool_calls"])
def test_a_key_of_a_message_moves_tokens_or_is_named(form, name):
    row = with_key(form, name)
    reads = tokenizer_of(CHATML.replace("{{ m.content }}", f"{{{{ m.content }}}}{{{{ m['{name}'] | default('') }}}}"))
    assert named(reads, form, row) == []
    refused = form == "supervised" and name in OTHER_CALLS  # a call that is trained on
    assert named(bytes_tokenizer("chatml"), form, row) == ([] if refused else [name])
    assert named(reads, form, row, apply_chat_template=False) == ([] if refused else [name])


@pytest.mark.parametrize("nothing", [None, "", [], {}], ids=str)
@pytest.mark.parametrize("name", MESSAGE_KEYS)
def test_a_key_that_says_nothing_is_not_named(name, nothing):
    messages = [USER | {name: nothing}, SAYS | {name: nothing}]
    assert named(bytes_tokenizer("chatml"), "supervised", {"messages": messages}) == []
    assert named(bytes_tokenizer("chatml"), "policy", {"prompt": [*messages, USER]}) == []


def test_calls_that_a_template_does_not_write_are_named():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    row = {"messages": [USER, call, {"role": "tool", "content": "2"}, SAYS]}
    assert named(tokenizer_of(), "supervised", row) == []
    with pytest.raises(ValueError, match=r"leaves out the call 'f' with {} of message 1"):
        encode_row(bytes_tokenizer("chatml"), supervised_row(row))
    row["messages"][1] = {**call, "weight": 0}
    assert named(bytes_tokenizer("chatml"), "supervised", row) == ["tool_calls"]
    assert named(bytes_tokenizer("chatml"), "policy", {"prompt": row["messages"][:3]}) == ["tool_calls"]


@pytest.mark.parametrize("form", FORMS)
def test_tools_and_arguments_move_tokens_or_are_named(form):
    row = {**FORMS[form], "tools": TOOLS, "chat_template_kwargs": {"mood": "brief", "style": 1}}
    everything = ["chat_template_kwargs.mood", "chat_template_kwargs.style", "tools"]
    assert named(tokenizer_of(), form, row) == ["chat_template_kwargs.style"]
    assert named(bytes_tokenizer("chatml"), form, row) == everything
    assert named(tokenizer_of(), form, row, apply_chat_template=False) == everything
    texts = {**row, "prompt": "1+1=", "answer": "2"}
    texts.pop("messages", None)
    assert named(tokenizer_of(), form, texts) == everything, "text alone is not rendered"


def test_one_row_that_a_key_moves_is_enough_among_the_first_ones(capsys):
    tokenizer = tokenizer_of(CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.name if m.name != 'x' }}"))
    rows = [{"prompt": [{**USER, "name": "x"}], "_where": f"row {n}"} for n in range(TRIES + 3)]
    encode = lambda row: encode_prompt(tokenizer, Chat.of(row))  # noqa: E731
    remark_on_keys(rows, encode)
    words = f"message key `name` is not read: it changes no token of the first {TRIES} of {TRIES + 3}, first row 0"
    assert remarks() == [words] and words in capsys.readouterr().out
    rows[TRIES - 1]["prompt"][0]["name"] = "y"
    remark_on_keys(rows, encode)
    assert remarks() == []


def test_a_template_s_argument_changes_the_text():
    tokenizer = tokenizer_of()
    chats = [Chat([USER], (), arguments) for arguments in ({}, ARGUMENTS)]
    plain, brief = (rendered(tokenizer, chat, generation_prompt=False) for chat in chats)
    assert brief == "brief" + plain


@pytest.mark.parametrize("size", [1, 4, TRIES + 8])
@pytest.mark.parametrize("reads", [None, 0, 1, 5, TRIES - 1, TRIES, TRIES + 7])
def test_a_key_is_tried_on_until_enough_rows_had_it_however_few_come_at_a_time(reads, size):
    """It is named once, read after all is said once, and later rows cost no encoding."""
    names = ["y" if place == reads else "x" for place in range(TRIES + 8)]
    rows = [{"prompt": [{**USER, "name": name}], "_where": f"row {n}"} for n, name in enumerate(names)]
    encoded = []

    def encode(row):
        encoded.append(row)
        return [int(message.get("name") == "y") for message in row["prompt"]]

    memory = KeyMemory()
    for start in range(0, len(rows), size):
        remark_on_keys(rows[start : start + size], encode, memory)
    lines = remarks()
    read = reads is not None and reads < TRIES
    expected = [] if read and reads < size else ["message key `name` is not read: it changes no token of "]
    assert [line[: len(words)] for line, words in zip(lines, expected, strict=False)] == expected
    after = ["message key `name` is read after all: it changes tokens of a later row, row " + str(reads)]
    assert lines[len(expected) :] == (after if read and expected else [])
    assert len(encoded) == 2 * (reads + 1 if read else TRIES)
    for row in rows:
        remark_on_keys([row], encode, memory)
    assert remarks() == [] and len(encoded) == 2 * (reads + 1 if read else TRIES)


def test_a_row_that_is_refused_with_and_without_a_key_says_nothing_of_the_key():
    def encode(row):
        if row["prompt"][0]["content"] == "bad":
            raise ValueError("refused")
        return [len(row["prompt"][0]["content"])]

    memory = KeyMemory()
    remark_on_keys([{"prompt": [{"role": "user", "content": "bad", "name": "x"}]}], encode, memory)
    assert remarks() == [] and memory == KeyMemory()
    remark_on_keys([{"prompt": [{**USER, "name": "x"}]}], encode, memory)
    assert remarks() == ["message key `name` is not read: it changes no token of 1 rows that have it"]
